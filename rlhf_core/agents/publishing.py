"""Finished groups become durable within seconds, so that a crash costs only the groups in flight.

A shard holds groups of one age: the oldest version that spoke is the same in all of them. So a group that has become too old to
be trained, and is sampled again, never lies in one shard with another that is trained: the rows of a batch are those of its
groups in its shards, and none of them comes twice.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from rlhf_core.records import episodes_of, oldest_version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from rlhf_core.records import Part, Trajectory

    _Kind: TypeAlias = tuple[int | None, str | None]  # oldest version that spoke; the one group with a failed sample

# A finished group waits at most this long for company in its shard.
MAX_WAIT_SECONDS = 5.0


class GroupPublisher:
    """Collects finished groups and publishes them as shards, off the event loop."""

    def __init__(self, publish: Callable[[list[Trajectory]], Part], groups_per_shard: int) -> None:
        self._publish = publish
        self._groups_per_shard = groups_per_shard
        self._waiting: dict[_Kind, list[Trajectory]] = {}
        self._groups = 0  # of those that wait for company
        self._oldest = 0.0
        self.parts: list[Part] = []

    async def add(self, groups: Sequence[Sequence[Trajectory]]) -> None:
        """Take the groups that finished together; they travel together too.

        One with a failed sample gets a shard of its own, at once: a later attempt may sample it again without the others.
        """
        for rows in groups:
            failed = any(episode.failed for episode in episodes_of(rows))
            kind = (oldest_version_of(rows), rows[0].group_id if failed else None)
            self._waiting.setdefault(kind, []).extend(rows)
            if not failed:
                self._oldest = self._oldest if self._groups else time.monotonic()
                self._groups += 1
        await self._publish_each([kind for kind in self._waiting if kind[1] is not None])
        if self._groups >= self._groups_per_shard or (self._groups and self._overdue):
            await self.flush()

    async def flush(self) -> None:
        """Publish what is waiting."""
        await self._publish_each(list(self._waiting))
        self._groups = 0

    async def flush_overdue(self) -> None:
        """Publish what has waited too long; call now and then while groups are slow to finish."""
        if self._groups and self._overdue:
            await self.flush()

    async def _publish_each(self, kinds: Sequence[_Kind]) -> None:
        """A shard each. Who is cancelled meanwhile waits until the shard under way is durable; the others stay waiting."""
        for kind in kinds:
            publishing = asyncio.create_task(asyncio.to_thread(self._publish, self._waiting.pop(kind)))
            try:
                await asyncio.shield(publishing)
            finally:
                self.parts.append(await publishing)

    @property
    def _overdue(self) -> bool:
        return time.monotonic() - self._oldest > MAX_WAIT_SECONDS
