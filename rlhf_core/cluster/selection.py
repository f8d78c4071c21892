"""Which rows of an iteration are trained: one rule, the same in every process that reads the shards.

::

    trajectories ⋈ rewards ─▶ not failed, scored, has actions ─▶ (group intact, with drop_group) ─▶ in a fixed order
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf_core.records import Ledger, RewardResult, RewardStatus, Trajectory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


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

    A failed sample is never trained, and never a zero. With ``keep_group`` its group goes on with the rest; with
    ``drop_group`` the group goes with it.
    """
    broken = {row.group_id for row in rows if _failed(row)} if on_error == "drop_group" else set()
    return [row for row in rows if not _failed(row) and row.num_actions > 0 and row.group_id not in broken]


def ledger(drawn: int, chosen: Iterable[Trajectory]) -> Ledger:
    """Where the prompts of an iteration went. A prompt without a single trained sample has failed."""
    trained = len({row.group_id for row in chosen})
    return Ledger(drawn=drawn, trained=trained, failed=drawn - trained)


def _failed(row: Trajectory) -> bool:
    return row.failed or row.reward_status is not RewardStatus.OK
