"""From executors to engines: batches what is asked in one tick, keeps equal prefixes together, spreads the load.

::

    executor tasks ──generate()──▶ this tick's requests ──one streaming call an engine──▶ EngineActor
          ▲                                                         │ chunks of finished completions
          └────────────────── futures ◀─────────────────────────────┘
"""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from rlhf_core.cluster.wait import PROCESS_GONE
from rlhf_core.errors import DeadlineError, WorkerError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from rlhf_core.records import GenerateRequest, Generation

    _Asked: TypeAlias = tuple[GenerateRequest, asyncio.Future[Generation]]

# A group stays on its engine until that engine has this many more requests in flight than the idlest one.
AFFINITY_SLACK = 32
# Seconds on top of the engine's own limit per request before the router gives up on the engine itself.
GRACE_SECONDS = 30.0


@dataclass(slots=True)
class _Lane:
    """One engine, and what it is doing."""

    handle: Any
    in_flight: int = 0
    waiting: list[_Asked] = field(default_factory=list)


class EngineRouter:
    """``Generate`` over the engine actors of a run. Lives on one event loop; ``close`` cancels what is open."""

    def __init__(self, engines: Sequence[Any], request_timeout: float) -> None:
        self._lanes = [_Lane(handle) for handle in engines]
        self._timeout = request_timeout + GRACE_SECONDS
        self._flushing = False
        self._streams: set[asyncio.Task[None]] = set()  # awaited by close()

    async def generate(self, request: GenerateRequest) -> Generation:
        """See ``records.Generate``."""
        lane = self._lane(request.affinity)
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        lane.in_flight += 1
        lane.waiting.append((request, answer))
        if not self._flushing:
            # Runs after every task that is ready now: requests made in one tick travel, and start, together.
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                return await answer
        except TimeoutError as error:
            if not limit.expired():  # the engine's own limit, in its own words
                raise
            raise DeadlineError(
                f"request {request.request_id}: no answer from its engine within {self._timeout:g} s"
            ) from error
        finally:
            lane.in_flight -= 1

    async def close(self) -> None:
        """Stop listening to the engines; whoever still waits for an answer is cancelled."""
        for stream in self._streams:
            stream.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)
        for lane in self._lanes:
            _abandon(lane.waiting)
            lane.waiting = []

    def _lane(self, affinity: str) -> _Lane:
        preferred = self._lanes[zlib.crc32(affinity.encode()) % len(self._lanes)]
        idlest = min(self._lanes, key=lambda lane: lane.in_flight)
        return preferred if preferred.in_flight - idlest.in_flight < AFFINITY_SLACK else idlest

    def _flush(self) -> None:
        self._flushing = False
        for lane in self._lanes:
            if lane.waiting:
                batch, lane.waiting = lane.waiting, []
                stream = asyncio.get_running_loop().create_task(self._stream(lane, batch))
                self._streams.add(stream)
                stream.add_done_callback(partial(self._ended, batch))

    def _ended(self, batch: list[_Asked], stream: asyncio.Task[None]) -> None:
        self._streams.discard(stream)
        if stream.cancelled():
            _abandon(batch)

    async def _stream(self, lane: _Lane, batch: list[_Asked]) -> None:
        try:
            async for reference in lane.handle.generate_stream.remote([request for request, _ in batch]):
                for index, result in await reference:
                    _resolve(batch[index][1], result)
            missing: Exception = WorkerError("the engine ended its stream without an answer")
        except PROCESS_GONE as error:
            missing = WorkerError(f"an engine died while generating: {error}")
        except Exception as error:  # noqa: BLE001  handed to every request that waits for it
            missing = error
        for _, answer in batch:
            _resolve(answer, missing)


def _abandon(batch: list[_Asked]) -> None:
    for _, answer in batch:
        answer.cancel()


def _resolve(answer: asyncio.Future[Generation], result: Generation | Exception) -> None:
    if answer.done():
        return
    if isinstance(result, Exception):
        answer.set_exception(result)
    else:
        answer.set_result(result)
