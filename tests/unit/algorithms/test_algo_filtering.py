import pytest

from rlhf_core.algorithms.filtering import FilterCounts, Verdict, judge_group, keep_group
from rlhf_core.errors import TrainingError


@pytest.mark.parametrize(
    ("scores", "verdict"),
    [
        ([0, 1, 0, 0], Verdict.KEPT),
        ([0, 0], Verdict.TOO_LOW),
        ([1, 1], Verdict.TOO_HIGH),
        ([0.5, 0.5], Verdict.NO_SPREAD),  # case 105
        ([0.1] * 8, Verdict.NO_SPREAD),
        ([-1, 1], Verdict.TOO_LOW),  # the bounds are strict
        ([0, 2], Verdict.TOO_HIGH),
    ],
)
def test_case_105_groups_between_the_bounds_and_with_spread_are_kept(scores, verdict):
    assert judge_group(scores, 0, 1) is verdict
    assert keep_group(scores, 0, 1) is (verdict is Verdict.KEPT)


def test_a_group_without_scores_has_failed():
    with pytest.raises(TrainingError, match="count it as failed"):
        keep_group([], 0, 1)


def test_case_104_counts_say_what_was_rejected():
    counts = FilterCounts()

    for scores in ([0, 0], [0, 0], [1, 1], [0, 1], [0.5, 0.5]):
        counts = counts.with_verdict(judge_group(scores, 0, 1))

    assert counts == FilterCounts(kept=1, too_low=2, too_high=1, no_spread=1)
    assert (counts.generated, counts.filtered, counts.kept_share) == (5, 4, 0.2)
    assert "5 groups generated, 1 kept, 2 with a mean score too low, 1 too high, 1 without spread, 0 failed" in str(
        counts
    )


def test_a_failed_group_is_generated_and_not_filtered():
    counts = FilterCounts().with_verdict(Verdict.FAILED)

    assert (counts.generated, counts.filtered, counts.failed, counts.kept_share) == (1, 0, 1, 0.0)


def test_case_107_kept_share_of_a_full_batch_is_one():
    """8 samples a group, all groups accepted: 100 %, not 800 %."""
    counts = FilterCounts()

    for _ in range(4):
        counts = counts.with_verdict(judge_group([0, 1] * 4, 0, 1))

    assert counts.kept_share == 1.0


def test_no_groups_yet():
    assert FilterCounts().kept_share == 0.0
