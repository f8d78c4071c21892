"""Two segments of an episode give what one row gives: returns, advantages, and the mean of a loss over the episode.

One episode as a row, and as two (c context, x action; the second conversation was rendered anew)::

    one    c x x c x x x          two    c x x
    tokens   0 1   2 3 4                     0 1
                                         c c c x x x
                                               2 3 4
"""

import pytest
import torch
from torch import tensor

from rlhf_core.algorithms.advantages import AdvantageInput, compute_advantages
from rlhf_core.algorithms.aggregation import aggregate
from rlhf_core.algorithms.estimators import ESTIMATORS
from rlhf_core.algorithms.segments import Joined
from rlhf_core.errors import TrainingError

pytestmark = pytest.mark.agents

WHOLE = tensor([[0, 1, 1, 0, 1, 1, 1], [0, 1, 0, 0, 0, 0, 0]]).bool()  # an episode of five tokens, and another of one
SPLIT = tensor([[0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1], [0, 1, 0, 0, 0, 0]]).bool()
VALUES = tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
KL = tensor([0.01, 0.02, 0.03, 0.04, 0.05, 0.06])


def on(mask, values):
    """``values`` on the action tokens, in order; something else elsewhere, which must not count."""
    placed = torch.full(mask.shape, 99.0)
    placed[mask] = values
    return placed


def both(name, *, gamma=1.0, lambd=1.0, steps=True, bootstrap=0.0):
    """The advantages and returns of the six action tokens, as one row and as two."""
    computed = []
    for mask, samples, step_rewards, after in (
        (WHOLE, [0, 1], [[(2, 0.25), (6, 0.75)], []], [bootstrap, 0.0]),
        (SPLIT, [0, 0, 1], [[(2, 0.25)], [(5, 0.75)], []], [7.0, bootstrap, 0.0]),
    ):
        rewards = [1.0] * (len(samples) - 1) + [0.5]
        batch = AdvantageInput(
            rewards_B=tensor(rewards),
            group_keys=["g"] * len(samples),
            sample_keys=samples,
            mask_BT=mask,
            step_rewards=step_rewards if steps else None,
            kl_BT=on(mask, KL),
            values_BT=on(mask, VALUES),
            bootstrap_B=tensor(after),
        )
        result = compute_advantages(batch, ESTIMATORS[name], gamma=gamma, lambd=lambd, kl_coef=0.1)
        assert not result.advantages_BT[~mask].any()
        computed.append((result.advantages_BT[mask], result.returns_BT[mask]))
    return computed


@pytest.mark.parametrize("steps", [True, False], ids=["step rewards", "one reward"])
@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_two_segments_have_the_advantages_of_one_row(name, steps):
    gamma = 0.9 if ESTIMATORS[name].free_gamma else 1.0

    one, two = both(name, gamma=gamma, lambd=0.8, steps=steps, bootstrap=0.3)

    for whole, split in zip(one, two, strict=True):
        torch.testing.assert_close(split, whole)


def test_a_later_reward_is_credited_to_the_earlier_segment_and_an_earlier_one_is_not_paid_again():
    """By hand, without KL: .25 at the end of the first segment, .75 at the end of the second."""
    batch = AdvantageInput(
        rewards_B=tensor([1.0, 1.0]),
        group_keys=[0, 0],
        sample_keys=[0, 0],
        mask_BT=SPLIT[:2],
        step_rewards=[[(2, 0.25)], [(5, 0.75)]],
    )

    result = compute_advantages(batch, ESTIMATORS["reinforce"])

    assert result.returns_BT.tolist() == [[0, 1, 1, 0, 0, 0], [0, 0, 0, 0.75, 0.75, 0.75]]


def test_segments_of_one_episode_are_found_wherever_the_rows_stand():
    joined = Joined.of(SPLIT[[0, 2, 1]], ["a", "b", "a"])

    values = on(SPLIT[[0, 2, 1]], tensor([1.0, 2, 6, 3, 4, 5]))

    assert joined.join(values).tolist() == [[1, 2, 3, 4, 5], [6, 0, 0, 0, 0]]
    torch.testing.assert_close(joined.split(joined.join(values))[SPLIT[[0, 2, 1]]], values[SPLIT[[0, 2, 1]]].double())


def test_the_last_segment_that_spoke_has_the_last_word():
    mask = tensor([[True], [True], [False]])

    assert Joined.of(mask, ["a", "a", "a"]).last(tensor([1.0, 2.0, 3.0])).tolist() == [2.0]


def test_a_step_reward_outside_the_actions_names_its_row():
    with pytest.raises(TrainingError, match="of row 1 lies at token 0"):
        Joined.of(SPLIT, ["a", "a", "b"]).steps([[], [(0, 1.0)], []])


# --- the mean over an episode

LOSSES = tensor([3.0, 1.0, 2.0, 2.0, 5.0, 4.0])  # of the six action tokens


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token", 17 / 6),
        ("sample", ((3 + 1 + 2 + 2 + 5) / 5 + 4) / 2),
        ("constant_length", 17 / (2 * 8)),
    ],
)
def test_an_episode_counts_once_however_many_segments_it_has(mode, expected):
    counts = {"num_tokens": 6, "num_sequences": 2, "length": 8}

    one = aggregate(on(WHOLE, LOSSES), WHOLE, mode, **counts)
    two = aggregate(on(SPLIT, LOSSES), SPLIT, mode, **counts, episode_tokens_B=tensor([5, 5, 1]))

    assert one.item() == pytest.approx(expected)
    assert two.item() == pytest.approx(expected)
