"""Finished groups become durable within seconds, so that a crash costs only the groups in flight."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from rlhf_core.records import episodes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rlhf_core.records import Part, Trajectory

# A finished group waits at most this long for company in its shard.
MAX_WAIT_SECONDS = 5.0


class GroupPublisher:
    """Collects finished groups and publishes them as shards, off the event loop."""

    def __init__(self, publish: Callable[[list[Trajectory]], Part], groups_per_shard: int) -> None:
        self._publish = publish
        self._groups_per_shard = groups_per_shard
        self._rows: list[Trajectory] = []
        self._groups = 0
        self._oldest = 0.0
        self.parts: list[Part] = []

    async def add(self, groups: Sequence[Sequence[Trajectory]]) -> None:
        """Take the groups that finished together; they travel together too.

        One with a failed sample gets a shard of its own: a later attempt may sample it again without the others.
        """
        for rows in groups:
            if any(episode.failed for episode in episodes_of(rows)):
                self.parts.append(await asyncio.to_thread(self._publish, list(rows)))
                continue
            if not self._groups:
                self._oldest = time.monotonic()
            self._rows.extend(rows)
            self._groups += 1
        if self._groups >= self._groups_per_shard or (self._groups and self._overdue):
            await self.flush()

    async def flush(self) -> None:
        """Publish what is waiting."""
        if not self._rows:
            return
        rows, self._rows, self._groups = self._rows, [], 0
        self.parts.append(await asyncio.to_thread(self._publish, rows))

    async def flush_overdue(self) -> None:
        """Publish what has waited too long; call now and then while groups are slow to finish."""
        if self._groups and self._overdue:
            await self.flush()

    @property
    def _overdue(self) -> bool:
        return time.monotonic() - self._oldest > MAX_WAIT_SECONDS
