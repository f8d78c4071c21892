"""Best of n, and preference pairs."""

import pytest

from rlhf_core.data.choosing import Candidate, best_of, pairs_of


def group(*samples, iteration=0, group="g", prompt="p"):
    """Each sample is (reward, text)."""
    return [
        Candidate(iteration, group, index, prompt, float(reward), hash(text))
        for index, (reward, text) in enumerate(samples)
    ]


def indices(chosen):
    return [(one.iteration, one.sample_index) for one in chosen]


def test_the_best_of_a_prompt_over_all_its_groups():
    rows = group((1, "a"), (3, "b"), (2, "c")) + group((9, "d"), (0, "e"), iteration=1)

    assert indices(best_of(rows, 2, "newest")) == [(0, 1), (1, 0)]


def test_each_prompt_has_its_own():
    rows = group((1, "a"), prompt="p") + group((5, "b"), (6, "c"), group="h", prompt="q")

    assert [(one.prompt_id, one.reward) for one in best_of(rows, 1, "newest")] == [("p", 1.0), ("q", 6.0)]


def test_no_text_comes_twice():
    rows = group((3, "same"), (3, "same"), (2, "other"))

    assert indices(best_of(rows, 2, "all")) == [(0, 0), (0, 2)]


@pytest.mark.parametrize(("ties", "chosen"), [("newest", [(1, 0)]), ("all", [(0, 0), (0, 1), (1, 0)]), ("skip", [])])
def test_equal_rewards_at_the_border(ties, chosen):
    rows = group((1, "a"), (1, "b"), (0, "c")) + group((1, "d"), iteration=1)

    assert indices(best_of(rows, 1, ties)) == chosen


def test_equal_rewards_within_the_choice_are_no_tie():
    assert indices(best_of(group((1, "a"), (1, "b"), (0, "c")), 2, "skip")) == [(0, 0), (0, 1)]


def pairs(rows, pairing="one", margin=0.0):
    return [(better.sample_index, worse.sample_index) for better, worse in pairs_of(rows, pairing, margin)]


def test_the_best_with_the_worst():
    assert pairs(group((1, "a"), (3, "b"), (0, "c"), (3, "d"))) == [(1, 2)]


def test_every_pair_but_equal_rewards_and_equal_texts():
    rows = group((1, "a"), (2, "b"), (2, "c"), (3, "a"))

    assert sorted(pairs(rows, "all")) == [(1, 0), (2, 0), (3, 1), (3, 2)]


@pytest.mark.parametrize(("margin", "found"), [(0.0, 3), (1.0, 3), (1.5, 1), (2.0, 1), (2.1, 0)])
def test_the_margin(margin, found):
    assert len(pairs(group((1, "a"), (2, "b"), (3, "c")), "all", margin)) == found


@pytest.mark.parametrize("rows", [group((1, "a"), (1, "b")), group((1, "a")), group((1, "a"), (2, "a")), []])
def test_groups_without_a_pair(rows):
    assert pairs(rows, "all") == []


def test_pairs_stay_within_their_group():
    rows = group((1, "a"), group="g") + group((2, "b"), group="h") + group((3, "c"), iteration=1)

    assert pairs(rows, "all") == []
