"""Rows of the same episode, seen as the one sample that they are.

A conversation whose token prefix broke is several rows::

    row    group  sample  segment   tokens spoken   stop
    0      a      0       0         5               stop           ┐ one episode of 8 tokens that ended with eos
    1      a      0       1         3               eos            ┘
    2      a      1       0         4               length         an episode of 4 tokens, truncated

Whatever counts samples (metrics, filters, failures, optimizer steps) counts these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_core.records.trajectory import StopReason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rlhf_core.records.trajectory import Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeRows:
    """The rows of one episode, in the order of their segments; at least one."""

    rows: tuple[Trajectory, ...]

    @property
    def key(self) -> tuple[str, int]:
        """(group, sample)."""
        return (self.rows[0].group_id, self.rows[0].sample_index)

    @property
    def last(self) -> Trajectory:
        """The segment that ended the episode: what is asked of one row (its answer, its stop reason) is asked of this one."""
        return next((row for row in reversed(self.rows) if not row.failed), self.rows[-1])

    @property
    def failed(self) -> bool:
        """True if the episode must not be trained: something in it failed, or all of it was cancelled.

        A segment that was cancelled beside others (a request that the agent gave up) is left out by itself.
        """
        return any(row.stop_reason is StopReason.ERROR for row in self.rows) or all(row.failed for row in self.rows)

    @property
    def error(self) -> str | None:
        """Why it failed; None if it did not, or nobody said."""
        if not self.failed:
            return None
        return next((row.error for row in reversed(self.rows) if row.error is not None), None)

    @property
    def stop_reason(self) -> StopReason:
        """Why the episode ended."""
        if any(row.stop_reason is StopReason.ERROR for row in self.rows):
            return StopReason.ERROR
        return self.last.stop_reason

    @property
    def truncated(self) -> bool:
        """True if the policy was cut off in any segment."""
        return any(row.stop_reason.truncated for row in self.rows)

    @property
    def num_actions(self) -> int:
        """Tokens the policy spoke, over all segments."""
        return sum(row.num_actions for row in self.rows)

    @property
    def num_turns(self) -> int:
        """Times the policy spoke, over all segments."""
        return sum(len(row.action_ranges) for row in self.rows)


def episodes_of(rows: Iterable[Trajectory]) -> list[EpisodeRows]:
    """The episodes of these rows, in the order in which they first come."""
    found: dict[tuple[str, int], list[Trajectory]] = {}
    for row in rows:
        found.setdefault((row.group_id, row.sample_index), []).append(row)
    return [EpisodeRows(tuple(sorted(of_one, key=lambda row: row.segment_index))) for of_one in found.values()]
