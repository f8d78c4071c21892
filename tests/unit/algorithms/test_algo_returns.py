import numpy as np
import pytest
import torch
from torch import tensor

from rlhf_core.algorithms.returns import discounted_returns, generalised_advantages, last_action, place_rewards
from rlhf_core.errors import TrainingError

ALL = torch.ones(1, 3, dtype=torch.bool)


def mask_of(*rows):
    return tensor([[c == "1" for c in row] for row in rows])


@pytest.mark.golden
@pytest.mark.parametrize(("gamma", "expected"), [(1.0, [0.94, 0.95, 0.97]), (0.9, [0.7577, 0.853, 0.97])])
def test_returns_with_a_kl_penalty(gamma, expected):
    rewards = tensor([[-0.01, -0.02, 1 - 0.03]])

    assert discounted_returns(rewards, ALL, gamma)[0].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.golden
@pytest.mark.parametrize(
    ("gamma", "lambd", "expected"),
    [
        (1.0, 1.0, [0.8, 0.6, 0.9]),
        (1.0, 0.95, [0.72725, 0.555, 0.9]),
        (0.99, 0.95, [0.708996, 0.54545, 0.9]),
    ],
)
def test_gae(gamma, lambd, expected):
    values, rewards = tensor([[0.2, 0.4, 0.1]]), tensor([[0.0, 0, 1]])

    advantages = generalised_advantages(rewards, values, ALL, gamma, lambd)

    assert advantages[0].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.golden
def test_gae_steps_over_environment_tokens():
    mask = mask_of("1100000011")
    rewards = torch.zeros(1, 10).index_fill(1, tensor([9]), 1.0)

    advantages = generalised_advantages(rewards, torch.full((1, 10), 0.5), mask, 1.0, 0.95)

    assert advantages[mask].tolist() == pytest.approx([0.428688, 0.45125, 0.475, 0.5], abs=1e-6)
    assert not advantages[~mask].any()


def test_gae_bootstraps_a_truncated_row():
    """delta of the last token = 1 + .5·.8 - .1."""
    advantages = generalised_advantages(tensor([[1.0]]), tensor([[0.1]]), mask_of("1"), 0.5, 1.0, tensor([0.8]))

    assert advantages.item() == pytest.approx(1.3)


def test_returns_step_over_environment_tokens():
    rewards = tensor([[0.0, 0, 0, 0, 0, 1]])

    returns = discounted_returns(rewards, mask_of("110001"), 0.9)

    assert returns[0].tolist() == pytest.approx([0.81, 0.9, 0, 0, 0, 1])


def test_whatever_stands_outside_the_mask_does_not_count():
    rewards, values = tensor([[1.0, float("nan"), 1.0]]), tensor([[0.5, float("inf"), 0.5]])
    mask = mask_of("101")

    returns, advantages = discounted_returns(rewards, mask, 1.0), generalised_advantages(rewards, values, mask, 1, 1)

    assert returns.tolist() == [[2, 0, 1]]
    assert advantages.tolist() == [[1.5, 0, 0.5]]


def test_scalar_reward_falls_on_the_last_action_token():
    placed = place_rewards(tensor([1.0, 2.0, 3.0]), mask_of("0110", "1001", "0000"))

    assert placed.tolist() == [[0, 0, 1, 0], [0, 0, 0, 2], [0, 0, 0, 0]]


def test_case_86_step_rewards_stay_at_their_turns():
    """.2 at the end of turn 1, 0 after turn 2, 1 at the end: total 1.2."""
    placed = place_rewards(tensor([1.2]), mask_of("110101"), [[(1, 0.2), (3, 0.0), (5, 1.0)]])

    assert placed[0].tolist() == pytest.approx([0, 0.2, 0, 0, 0, 1.0])


def test_what_shaping_changed_falls_on_the_last_action_token():
    """Steps .5 and .5, but the shaped total is .6."""
    placed = place_rewards(tensor([0.6]), mask_of("1101"), [[(0, 0.5), (1, 0.5)]])

    assert placed[0].tolist() == pytest.approx([0.5, 0.5, 0, -0.4])


@pytest.mark.parametrize("position", [2, 4, -1])
def test_step_reward_outside_the_actions_is_an_error(position):
    with pytest.raises(TrainingError, match=rf"row 0 lies at token {position}, which is not an action token"):
        place_rewards(tensor([1.0]), mask_of("1101"), [[(position, 1.0)]])


def test_last_action():
    assert last_action(mask_of("0110", "1001", "0000")).tolist() == [2, 3, 0]


def test_a_single_row_of_float64_is_not_written_to():
    """A transposed row is contiguous: a scan in place must not find the caller's memory."""
    rewards, values = torch.ones(1, 4, dtype=torch.float64), torch.full((1, 4), 0.5, dtype=torch.float64)

    generalised_advantages(rewards, values, mask_of("1101"), 0.9, 0.9)

    assert rewards.tolist() == [[1, 1, 1, 1]]
    assert values.tolist() == [[0.5, 0.5, 0.5, 0.5]]


@pytest.mark.golden
@pytest.mark.parametrize("width", [255, 256, 257, 700])
def test_long_rows_equal_a_plain_loop(width):
    """Longer than the pieces in which the scan works, with a value after the last token."""
    rng = np.random.default_rng(width)
    mask, (rewards, values) = rng.random((3, width)) < 0.6, rng.normal(size=(2, 3, width))
    last, expected = rng.normal(size=3), np.zeros((3, width))
    for row in range(3):
        advantage, next_value = 0.0, last[row]
        for t in np.flatnonzero(mask[row])[::-1]:
            delta = rewards[row, t] + 0.99 * next_value - values[row, t]
            advantage = delta + 0.99 * 0.95 * advantage
            next_value = values[row, t]
            expected[row, t] = advantage

    found = generalised_advantages(*map(torch.from_numpy, (rewards, values, mask)), 0.99, 0.95, torch.from_numpy(last))

    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_rows_of_no_tokens():
    mask = torch.zeros(2, 0, dtype=torch.bool)

    placed = place_rewards(tensor([1.0, 2.0]), mask)

    assert discounted_returns(placed, mask, 1.0).shape == (2, 0)
