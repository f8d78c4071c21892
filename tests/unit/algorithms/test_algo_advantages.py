"""The pipeline on inputs worked by hand. The reference rewards are 3 groups of 4: 1001, .5 × 4, 2 -1 0 0."""

import pytest
import torch
from torch import tensor

from rlhf_core.algorithms.advantages import AdvantageInput, compute_advantages, whiten
from rlhf_core.algorithms.estimators import ESTIMATORS
from rlhf_core.errors import ConfigError, TrainingError

REWARDS = [1, 0, 0, 1, 0.5, 0.5, 0.5, 0.5, 2, -1, 0, 0]
LENGTHS = [2, 1, 3, 2, 1, 1, 1, 1, 4, 2, 1, 1]
GROUPS = [row // 4 for row in range(12)]


def mask_of(lengths):
    return torch.arange(max(lengths)) < tensor(lengths).unsqueeze(1)


def batch_of(rewards, lengths, groups=None, samples=None, **rest):
    rows = range(len(rewards))
    return AdvantageInput(
        rewards_B=tensor(rewards, dtype=torch.float64),
        group_keys=groups if groups is not None else [0] * len(rewards),
        sample_keys=samples if samples is not None else list(rows),
        mask_BT=mask_of(lengths),
        **rest,
    )


def run(name, batch, **settings):
    return compute_advantages(batch, ESTIMATORS[name], **settings)


@pytest.mark.golden
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("reinforce_baseline", [0.328305, -0.766046, -0.766046, 0.328305]
         + [-0.21887] * 4 + [1.696245, -1.586809, -0.492458, -0.492458]),
        ("reinforce", [0.450035, -0.675053, -0.675053, 0.450035]
         + [-0.112509] * 4 + [1.575123, -1.800141, -0.675053, -0.675053]),
        ("rloo", [2 / 3, -2 / 3, -2 / 3, 2 / 3] + [0] * 4 + [7 / 3, -5 / 3, -1 / 3, -1 / 3]),
        ("dr_grpo", [0.5, -0.5, -0.5, 0.5] + [0] * 4 + [1.75, -1.25, -0.25, -0.25]),
        ("group_norm", [0.866025, -0.866025, -0.866025, 0.866025]
         + [0] * 4 + [1.390759, -0.993399, -0.19868, -0.19868]),
    ],
)  # fmt: skip
def test_every_action_token_gets_the_advantage_of_its_row(name, expected):
    result = run(name, batch_of(REWARDS, LENGTHS, GROUPS))

    for row, value in enumerate(expected):
        tokens = [value] * LENGTHS[row] + [0] * (4 - LENGTHS[row])
        assert result.advantages_BT[row].tolist() == pytest.approx(tokens, abs=1e-6)


@pytest.mark.golden
@pytest.mark.parametrize(("name", "mean", "variance"), [("reinforce_baseline", 0.2, 0.835), ("reinforce", 0.6, 0.79)])
def test_mean_and_variance_that_whitening_removes(name, mean, variance):
    returns = run(name, batch_of(REWARDS, LENGTHS, GROUPS)).returns_BT[mask_of(LENGTHS)]

    assert returns.mean().item() == pytest.approx(mean, abs=1e-6)
    assert returns.var(correction=0).item() == pytest.approx(variance, abs=1e-6)


def test_group_mean_and_std_are_recorded():
    result = run("rloo", batch_of(REWARDS, LENGTHS, GROUPS))

    assert result.group_mean_B.tolist() == [0.5] * 4 + [0.5] * 4 + [0.25] * 4
    assert result.group_std_B.tolist() == pytest.approx([0.577350] * 4 + [0] * 4 + [1.258306] * 4, abs=1e-6)


@pytest.mark.golden
@pytest.mark.parametrize(("gamma", "expected"), [(1.0, [0.94, 0.95, 0.97]), (0.9, [0.7577, 0.853, 0.97])])
def test_kl_is_a_penalty_on_every_action_token(gamma, expected):
    batch = batch_of([1.0], [3], kl_BT=tensor([[0.1, 0.2, 0.3]]))

    result = run("reinforce", batch, gamma=gamma, kl_coef=0.1)

    assert result.returns_BT[0].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.golden
@pytest.mark.parametrize(
    ("gamma", "lambd", "returns"),
    [(1.0, 1.0, [1, 1, 1]), (1.0, 0.95, [0.92725, 0.955, 1]), (0.99, 0.95, [0.908996, 0.94545, 1])],
)
def test_gae_returns_are_the_critics_targets(gamma, lambd, returns):
    batch = batch_of([1.0], [3], values_BT=tensor([[0.2, 0.4, 0.1]]))

    result = run("gae", batch, gamma=gamma, lambd=lambd)

    assert result.returns_BT[0].tolist() == pytest.approx(returns, abs=1e-6)


def test_no_std_norm_keeps_only_the_centring():
    result = run("reinforce", batch_of([1.0, 0.0], [1, 3]), no_std_norm=True)

    assert result.advantages_BT.tolist() == [[0.75, 0, 0], [-0.25, -0.25, -0.25]]


@pytest.mark.golden
def test_case_52_groups_are_over_episodes_not_rows():
    """One task, 4 samples [1, 0, 1, 0], each in 2 segments."""
    rewards, samples = [1, 1, 0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 2, 2, 3, 3]

    result = run("group_norm", batch_of(rewards, [1] * 8, samples=samples))

    expected = [0.866025, 0.866025, -0.866025, -0.866025] * 2
    assert result.advantages_BT[:, 0].tolist() == pytest.approx(expected, abs=1e-6)


def test_segments_of_unequal_number_do_not_shift_the_mean():
    """Sample 0 (reward 1) in 3 segments, sample 1 (reward 0) in 1: the mean is .5, not .75."""
    result = run("dr_grpo", batch_of([1, 1, 1, 0], [1] * 4, samples=[0, 0, 0, 1]))

    assert result.shaped_B.tolist() == [0.5, 0.5, 0.5, -0.5]


def test_segments_with_different_rewards_are_an_error():
    with pytest.raises(TrainingError, match="rows 0 and 1 are segments of one episode"):
        run("rloo", batch_of([1, 2], [1, 1], samples=[0, 0]))


def test_a_group_that_lost_samples_goes_on_with_the_rest():
    result = run("rloo", batch_of([1.0, 0.0, 5.0], [1, 1, 1], groups=["a", "a", "b"]))

    assert result.shaped_B.tolist() == [1, -1, 0]


@pytest.mark.golden
@pytest.mark.parametrize("name", ["reinforce_baseline", "rloo", "group_norm", "dr_grpo"])
def test_case_51_equal_rewards_give_no_advantage(name):
    result = run(name, batch_of([0.1] * 8, [3] * 8))

    assert not result.advantages_BT.any()


def test_case_53_row_without_actions_is_zero_and_finite():
    result = run("reinforce", batch_of([1.0, 0.0, 7.0], [2, 2, 0]))

    assert not result.advantages_BT[2].any()
    assert result.advantages_BT[:2].tolist() == [[1, 1], [-1, -1]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_case_54_reward_that_is_not_finite_is_refused(bad):
    with pytest.raises(TrainingError, match=r"rewards of rows \[1\] are not finite"):
        run("group_norm", batch_of([1.0, bad, 0.0], [1, 1, 1]))


def test_step_rewards_are_kept_by_reinforce_only():
    batch = batch_of([1.0, 0.0], [2, 2], step_rewards=[[(0, 0.8), (1, 0.2)], []])

    kept, summed = run("reinforce", batch), run("rloo", batch)

    assert kept.returns_BT[0].tolist() == pytest.approx([1.0, 0.2])
    assert summed.returns_BT[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", ["reinforce_baseline", "rloo", "group_norm", "dr_grpo"])
def test_gamma_of_a_group_estimator_is_an_error(name):
    with pytest.raises(ConfigError, match=r"gamma=0.9 has no meaning"):
        run(name, batch_of([1.0, 0.0], [1, 1]), gamma=0.9)


def test_gae_without_values_is_an_error():
    with pytest.raises(ConfigError, match="needs the critic's values"):
        run("gae", batch_of([1.0], [1]))


def test_penalty_without_kl_is_an_error():
    with pytest.raises(ConfigError, match="needs kl_BT"):
        run("rloo", batch_of([1.0, 0.0], [1, 1]), kl_coef=0.1)


def test_columns_of_different_lengths_are_an_error():
    with pytest.raises(TrainingError, match="group_keys has 1 entries for 2 rows"):
        run("rloo", batch_of([1.0, 0.0], [1, 1], groups=[0]))


def test_whitening_of_a_batch_without_spread_is_zero():
    """Rounding noise is not divided by rounding noise."""
    result = run("reinforce", batch_of([0.1] * 7, [3] * 7))

    assert result.advantages_BT.abs().max() < 1e-9


def test_whitening_of_a_batch_without_actions():
    nothing = torch.zeros(2, 3, dtype=torch.bool)

    assert not whiten(torch.ones(2, 3), nothing).any()
