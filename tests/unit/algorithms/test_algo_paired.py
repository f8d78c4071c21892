"""Two models on the same prompts, by hand.

champion      0.0  0.5  1.0  0.5
challenger    0.5  0.5  0.5  1.0        differences 0.5 0 -0.5 0.5: mean 0.125, s² = 0.6875 / 3, error √(s² / 4) = 0.2394
"""

import math

import pytest

from rlhf_core.algorithms.paired import paired


def test_by_hand():
    found = paired([0.0, 0.5, 1.0, 0.5], [0.5, 0.5, 0.5, 1.0])

    assert (found.prompts, found.champion, found.challenger, found.difference) == (4, 0.5, 0.625, 0.125)
    assert found.standard_error == pytest.approx(math.sqrt(0.6875 / 3 / 4))
    assert (found.better, found.worse) == (2, 1)


def test_what_is_hard_for_both_is_no_noise():
    """Scores all over the place, and a challenger that is better by 0.1 on each."""
    champion = [0.0, 0.9, 0.1, 0.8]

    assert paired(champion, [score + 0.1 for score in champion]).standard_error == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("margin", "errors", "clears"),
    [(0.0, 0.0, True), (0.125, 0.0, True), (0.13, 0.0, False), (0.0, 0.5, True), (0.0, 0.6, False)],
)
def test_what_a_challenger_has_to_clear(margin, errors, clears):
    found = paired([0.0, 0.5, 1.0, 0.5], [0.5, 0.5, 0.5, 1.0])

    assert found.clears(margin, errors) is clears


def test_an_equal_one_never_clears():
    assert not paired([0.5, 0.5], [0.5, 0.5]).clears(0.0, 0.0)


def test_a_margin_that_is_just_met_is_met():
    """0.6 - 0.5 is 0.09999999999999998."""
    assert paired([0.5], [0.6]).clears(0.1, 0.0)


def test_one_prompt_has_no_error_and_clears_none():
    found = paired([0.0], [1.0])

    assert found.standard_error is None
    assert (found.clears(0.5, 0.0), found.clears(0.5, 2.0)) == (True, False)
