"""Which server is asked next: each in turn, one that failed not for a while.

::

    healthy ──a call fails──▶ avoided ──its time is over──▶ one call at a time ──answer──▶ healthy
                                 ▲                                  │
                                 └───────── longer each time ───────┘

It is avoided for at least as long as the failed call took: to look again at one that hangs costs that much. If there
is no other, it is asked after a shorter rest.

A failed call says nothing about a server that answered another one since the call began: then it was the samples.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from typing import TYPE_CHECKING

from rlhf_core.rewards.http_call import shown
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

log = get_logger(__name__)

FIRST_PAUSE = 0.25  # seconds, doubled with each failure in a row
MAX_PAUSE = 10.0  # seconds: a server that comes back is in use again soon
MAX_SILENCE = 8  # failed calls in a row, without any answer, that no unlucky samples explain


def pause(failures: int) -> float:
    """Seconds to wait after so many failures in a row: exponential, bounded, and never the same for two clients."""
    return min(FIRST_PAUSE * 2.0 ** min(failures - 1, 30), MAX_PAUSE) * random.uniform(0.75, 1.25)


class Server:
    """One server as its last calls showed it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = shown(url)
        self.failures = 0  # in a row
        self.last_error = "not asked yet"
        self.num_calls = 0  # under way
        self.avoided_until = 0.0  # monotonic seconds
        self.rests_until = 0.0  # the same, where there is no other server
        self._judged_at = 0.0  # when an answer or a failure last said something about it

    def usable(self, now: float) -> bool:
        """True if a call may go to it."""
        return self.failures == 0 or (now >= self.avoided_until and self.num_calls == 0)

    def usable_at_need(self, now: float) -> bool:
        """True if a call may go to it where no server is usable."""
        return now >= self.rests_until and self.num_calls == 0

    def note_answer(self, now: float) -> None:
        """It works."""
        if self.failures:
            log.info("reward server %s answers again", self.name)
        self.failures, self._judged_at = 0, now

    def note_failure(self, started: float, now: float, error: str) -> None:
        """A call that began at ``started`` failed."""
        self.last_error = error
        if started < self._judged_at:  # it answered since, or the same outage was counted when another call failed
            return
        self.failures += 1
        rest = pause(self.failures)
        self.rests_until, self.avoided_until, self._judged_at = now + rest, now + max(rest, now - started), now
        if self.failures == 1:  # one that stays down is looked at for hours: it is told once
            log.warning("reward server %s failed, and is avoided until it answers again: %s", self.name, error)


class Servers:
    """All servers of a source. Belongs to one event loop."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._servers = [Server(url) for url in urls]
        self._next = 0
        self._changed = asyncio.Event()
        self._answered_at = 0.0  # monotonic seconds: the last answer of any of them
        self._num_silent = 0  # failed calls that began after it

    def __len__(self) -> int:
        return len(self._servers)

    async def take(self, tried: Collection[Server], until: float) -> Server | None:
        """The server for a call, untried ones first; None if all are avoided until the monotonic time ``until``.

        ``give_back`` must follow.
        """
        while (server := self._pick(tried)) is None:
            now = time.monotonic()
            if now >= until:
                return None
            rested = min((server.rests_until for server in self._servers if not server.num_calls), default=until)
            event = self._changed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(rested, until) - now):
                    await event.wait()
        server.num_calls += 1
        return server

    def give_back(self, server: Server) -> None:
        """The call has ended, whatever came of it."""
        server.num_calls -= 1
        self._changed.set()
        self._changed = asyncio.Event()

    def note_answer(self, server: Server) -> None:
        """The server answered."""
        self._answered_at, self._num_silent = time.monotonic(), 0
        server.note_answer(self._answered_at)

    def note_failure(self, server: Server, started: float, error: str) -> None:
        """A call that began at the monotonic time ``started`` failed."""
        if started >= self._answered_at:
            self._num_silent += 1
        server.note_failure(started, time.monotonic(), error)

    def answered_since(self, started: float) -> bool:
        """True if any server answered anything since then."""
        return self._answered_at >= started

    @property
    def silent(self) -> bool:
        """True if every server fails, and not because of some unlucky samples."""
        return self._num_silent >= MAX_SILENCE and all(server.failures for server in self._servers)

    def describe(self) -> str:
        """Each server with its last error."""
        return "; ".join(f"{server.name}: {server.last_error}" for server in self._servers)

    def _pick(self, tried: Collection[Server]) -> Server | None:
        now = time.monotonic()
        in_turn = [*self._servers[self._next :], *self._servers[: self._next]]
        usable = [server for server in in_turn if server.usable(now)]
        usable = usable or [server for server in in_turn if server.usable_at_need(now)]
        if not usable:
            return None
        chosen = next((server for server in usable if server not in tried), usable[0])
        self._next = (self._servers.index(chosen) + 1) % len(self._servers)
        return chosen
