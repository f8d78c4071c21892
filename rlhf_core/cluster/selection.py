"""Which rows of an iteration are trained: one rule, the same in every process that reads the shards.

::

    trajectories ⋈ rewards ─▶ of the batch ─▶ not failed, scored, has actions ─▶ (group intact, with drop_group)
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf_core.records import RewardResult, RewardStatus, Trajectory, episodes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rlhf_core.records import StageRef
    from rlhf_core.storage import RunStore


def rows_of_batch(store: RunStore, rollout: StageRef, reward: StageRef) -> list[Trajectory]:
    """The rows of an iteration's batch with their rewards, in a fixed order.

    Where a batch is filled in rounds its shards also hold groups that were filtered, or are of another batch: they are left
    out.
    """
    played = store.read_manifest(rollout)
    scored = store.read_rewards(store.read_manifest(reward).parts)
    rows = store.read_trajectories(played.parts)
    if (selected := played.selected) is not None:
        rows = [row for row in rows if row.group_id in selected]
    return with_rewards(rows, {(row.group_id, row.sample_index): row.result for row in scored})


def with_rewards(
    trajectories: Iterable[Trajectory], rewards: Mapping[tuple[str, int], RewardResult]
) -> list[Trajectory]:
    """Every row with its reward filled in, ordered by (group, sample, segment)."""
    unscored = RewardResult(status=RewardStatus.SKIPPED)
    rows = []
    for row in trajectories:
        result = rewards.get((row.group_id, row.sample_index), unscored)
        rows.append(
            replace(
                row,
                reward=result.reward,
                score=result.score,
                reward_status=result.status,
                metrics={**row.metrics, **result.metrics},
            )
        )
    return sorted(rows, key=lambda row: row.key)


def trainable(rows: Sequence[Trajectory], on_error: str) -> list[Trajectory]:
    """The rows of ``with_rewards`` that are trained.

    A failed sample is never trained, and never a zero: all its segments are left out. With ``keep_group`` its group goes on
    with the rest; with ``drop_group`` the group goes with it.
    """
    failed = {episode.key for episode in episodes_of(rows) if episode.failed or not _is_scored(episode.last)}
    broken = {group_id for group_id, _ in failed} if on_error == "drop_group" else set()
    return [
        row
        for row in rows
        if row.key[:2] not in failed and not row.failed and row.num_actions > 0 and row.group_id not in broken
    ]


def usable_scores(rows: Sequence[Trajectory], on_error: str) -> dict[str, list[float]]:
    """The scores of each group's samples that could be trained, one a sample; none where the group has failed."""
    scores: dict[str, dict[int, float]] = {row.group_id: {} for row in rows}
    for row in trainable(rows, on_error):
        score = row.reward if row.score is None else row.score
        assert score is not None, "trainable leaves out what has no reward"
        scores[row.group_id][row.sample_index] = score  # the segments of an episode share it
    return {group_id: list(of_group.values()) for group_id, of_group in scores.items()}


def _is_scored(row: Trajectory) -> bool:
    return row.reward_status is RewardStatus.OK
