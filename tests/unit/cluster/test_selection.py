"""Which rows are trained, and where the prompts went."""

import dataclasses

import pytest
from cluster_samples import failed, row, scored

from rlhf_core.cluster.selection import ledger, trainable, with_rewards
from rlhf_core.records import Ledger, RewardResult, RewardStatus, StopReason


def keys(rows):
    return [(r.group_id, r.sample_index) for r in rows]


def group(name="g0", rewards=(1.0, 0.0, RewardStatus.TIMED_OUT, 0.5)):
    rows = [row(name, i) for i in range(len(rewards))]
    return with_rewards(rows, scored(rows, rewards))


# --- with_rewards


def test_rows_are_ordered_by_group_sample_and_segment():
    rows = [row("g1"), row("g0", 1), row("g0", 0, segment_index=1), row("g0", 0)]

    ordered = with_rewards(rows, {})

    assert [r.key for r in ordered] == [("g0", 0, 0), ("g0", 0, 1), ("g0", 1, 0), ("g1", 0, 0)]


def test_a_row_gets_its_reward_with_everything_that_came_with_it():
    result = RewardResult(RewardStatus.OK, 0.5, 1.0, {"parts/digits": 0.5})

    [found] = with_rewards([row(metrics={"turns": 3.0})], {("g0", 0): result})

    assert (found.reward, found.score, found.reward_status) == (0.5, 1.0, RewardStatus.OK)
    assert found.metrics == {"turns": 3.0, "parts/digits": 0.5}


def test_a_row_without_a_reward_is_skipped_not_zero():
    [found] = with_rewards([row()], {})

    assert (found.reward, found.reward_status) == (None, RewardStatus.SKIPPED)


def test_segments_share_the_reward():
    rows = with_rewards([row(), row(segment_index=1)], {("g0", 0): RewardResult(RewardStatus.OK, 0.5, 0.5)})

    assert [r.reward for r in rows] == [0.5, 0.5]


# --- trainable


def test_a_sample_without_a_reward_is_left_out():
    """CASE 99"""
    assert keys(trainable(group(), "keep_group")) == [("g0", 0), ("g0", 1), ("g0", 3)]


def test_drop_group_drops_its_whole_group():
    rows = [*group("g0"), *group("g1", (1.0, 0.0))]

    assert keys(trainable(rows, "drop_group")) == [("g1", 0), ("g1", 1)]


@pytest.mark.parametrize(("on_error", "usable"), [("keep_group", 31), ("drop_group", 28)])
def test_one_failed_sample_of_32(on_error, usable):
    """CASE 21"""
    rows = [failed(f"g{p}", s) if (p, s) == (3, 2) else row(f"g{p}", s) for p in range(8) for s in range(4)]
    results = scored(rows, [RewardStatus.SKIPPED if r.failed else 1.0 for r in rows])

    assert len(trainable(with_rewards(rows, results), on_error)) == usable


@pytest.mark.parametrize(
    "bad",
    [
        failed("g0", 1),
        row("g0", 1, stop=StopReason.ABORTED),
        row("g0", 1, answer=0),
    ],
    ids=["failed", "aborted", "no action"],
)
def test_a_row_that_must_not_be_trained_is_left_out_whatever_its_reward(bad):
    """CASE 27"""
    rows = [row("g0", 0), bad]

    chosen = trainable(with_rewards(rows, scored(rows, [1.0, 1.0])), "keep_group")

    assert keys(chosen) == [("g0", 0)]


def test_the_reward_of_a_failed_row_is_never_a_zero():
    rows = [row("g0", 0), failed("g0", 1)]

    found = with_rewards(rows, scored(rows, [1.0, RewardStatus.SKIPPED]))

    assert found[1].reward is None


# --- ledger


@pytest.mark.parametrize(
    ("drawn", "groups", "account"),
    [
        (3, ["g0", "g0", "g1", "g2"], Ledger(drawn=3, trained=3)),
        (3, ["g0", "g0"], Ledger(drawn=3, trained=1, failed=2)),
        (3, [], Ledger(drawn=3, failed=3)),
    ],
)
def test_where_the_prompts_went(drawn, groups, account):
    found = ledger(drawn, [row(name, i) for i, name in enumerate(groups)])

    assert found == account
    assert found.balanced


@pytest.mark.parametrize("name", ["drawn", "trained", "filtered", "failed", "buffered"])
def test_the_law_of_the_ledger(name):
    """drawn == trained + filtered + failed + buffered"""
    account = Ledger(drawn=10, trained=4, filtered=3, failed=2, buffered=1)

    broken = dataclasses.replace(account, **{name: getattr(account, name) + 1})

    assert account.balanced
    assert not broken.balanced
