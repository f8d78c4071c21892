"""Which rows are trained."""

import pytest
from cluster_samples import failed, row, scored

from rlhf_core.cluster.selection import rows_of_batch, trainable, usable_scores, with_rewards
from rlhf_core.records import RewardResult, RewardStatus, Stage, StageManifest, StopReason
from rlhf_core.storage import RewardRow, RunStore


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


# --- usable_scores


def test_scores_are_those_of_the_samples_that_could_be_trained():
    """A sample without a reward, and one that failed, are left out; segments count once."""
    rows = [row("g0", 0), row("g0", 1), failed("g0", 2), row("g0", 0, segment_index=1), failed("g1", 0)]
    results = {
        ("g0", 0): RewardResult(RewardStatus.OK, 0.25, 1.0),
        ("g0", 1): RewardResult(RewardStatus.TIMED_OUT),
    }

    assert usable_scores(with_rewards(rows, results), "keep_group") == {"g0": [1.0], "g1": []}


def test_a_dropped_group_has_no_scores():
    assert usable_scores([*group("g0"), *group("g1", (1.0, 0.0))], "drop_group") == {"g0": [], "g1": [1.0, 0.0]}


# --- rows_of_batch


@pytest.mark.parametrize(("selected", "found"), [(None, ["g0", "g1", "g2"]), (["g2", "g0"], ["g0", "g2"]), ([], [])])
def test_only_groups_of_the_batch_are_read(tmp_path, selected, found):
    """Three groups share a shard."""
    store = RunStore("run", str(tmp_path))
    part = store.publish_trajectories(0, [row(name) for name in ("g0", "g1", "g2")])
    rewards = store.publish_rewards(0, [RewardRow(f"g{i}", 0, RewardResult(RewardStatus.OK, i, i)) for i in range(3)])
    body = {} if selected is None else {"selected": [{"group_id": name} for name in selected]}
    rollout = store.commit(StageManifest("run", 0, Stage.ROLLOUT, (part,), 3, 12, 0, body=body))
    reward = store.commit(StageManifest("run", 0, Stage.REWARD, (rewards,), 3, 0, 0))

    rows = rows_of_batch(store, rollout, reward)

    assert [(r.group_id, r.reward) for r in rows] == [(name, float(name[1])) for name in found]
