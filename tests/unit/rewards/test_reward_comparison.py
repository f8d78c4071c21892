"""Two rewards for the same answers, compared; numbers worked by hand."""

import numpy as np
import pytest

from rlhf_core.rewards.comparison import Compared, moments, ranks
from rlhf_core.rewards.scatter import draw_scatter


def compared(*groups):
    """Each group is a list of (old, new)."""
    numbers = [number for number, group in enumerate(groups) for _ in group]
    pairs = [pair for group in groups for pair in group]
    return Compared(np.array(numbers), np.array([p[0] for p in pairs], float), np.array([p[1] for p in pairs], float))


def test_the_same_order_on_another_scale():
    summary = compared([(0, 10), (1, 20), (2, 30)], [(5, 60), (4, 50)]).summary()

    assert summary["pearson"] == pytest.approx(1)
    assert summary["spearman"] == pytest.approx(1)
    assert (summary["advantage_sign_changed"], summary["order_changed"], summary["pairs_swapped"]) == (0, 0, 0)
    assert summary["old"] == {"mean": 2.4, "std": pytest.approx(1.8547, abs=1e-4), "min": 0, "max": 5}


def test_what_changes_within_a_group_is_counted_there():
    """
    group 0   old 0 1 2   new 0 2 1     samples 1 and 2 swapped: 1 of 3 pairs, 2 of 3 samples
              mean 1, side - 0 +        mean 1, side - + 0: two of them changed sides
    group 1   old 1 3     new 1 3       nothing
    group 2   one sample: no comparison within
    """
    summary = compared([(0, 0), (1, 2), (2, 1)], [(1, 1), (3, 3)], [(9, -9)]).summary()

    assert summary["pairs_swapped"] == pytest.approx(1 / 4)
    assert summary["order_changed"] == pytest.approx(2 / 5)
    assert summary["advantage_sign_changed"] == pytest.approx(2 / 5)
    assert (summary["compared"], summary["groups"]) == (6, 3)


def test_a_tie_that_is_resolved_is_no_swap():
    summary = compared([(1, 0), (1, 1)]).summary()

    assert (summary["pairs_swapped"], summary["order_changed"]) == (0, 0)
    assert summary["advantage_sign_changed"] == 1.0


@pytest.mark.parametrize("value", [0.1, 1e-30, 1e300, -7.3])
def test_equal_rewards_are_at_their_mean_whatever_floats_make_of_it(value):
    assert compared([(value, 3 * value)] * 7).summary()["advantage_sign_changed"] == 0


def test_a_constant_correlates_with_nothing():
    summary = compared([(1, 0), (1, 1)]).summary()

    assert (summary["pearson"], summary["spearman"]) == (None, None)


def test_one_sample_and_none():
    assert compared([(1, 2)]).summary()["advantage_sign_changed"] is None
    assert moments([])["mean"] is None
    assert ranks(np.array([])).tolist() == []


def test_ranks_share_the_middle_of_ties():
    assert ranks(np.array([3.0, 1.0, 1.0, 9.0])).tolist() == pytest.approx([2 / 3, 1 / 6, 1 / 6, 1.0])
    assert ranks(np.array([5.0])).tolist() == [0.5]


def test_who_moved_most():
    moved = compared([(0, 3), (1, 1), (2, 2), (3, 0)])

    assert moved.moved_most(3) == [0, 3]  # the middle two are where they were
    assert moved.moves().tolist() == pytest.approx([1, 0, 0, -1])


@pytest.mark.parametrize(
    "rewards",
    [[0.5], [0.0, 1.0] * 50, list(np.random.default_rng(0).normal(size=2500)), [1e308, -1e308], [0.0] * 3],
    ids=["one", "discs", "hexagons", "huge", "constant"],
)
def test_a_picture_of_any_number_of_points(rewards):
    values = np.array(rewards)

    image = draw_scatter(values, values[::-1].copy(), "reward of $the run", "new_$reward", "größe")

    assert image.startswith(b"\x89PNG")
    assert len(image) > 5000
