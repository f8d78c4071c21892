"""From executors to engines: batches what is asked in one tick, keeps equal prefixes together, spreads the load.

::

    executor tasks ──generate()──▶ this tick's requests ──one streaming call an engine──▶ EngineActor
          ▲                                                         │ chunks of finished completions  ▲
          ├────────────────── futures ◀─────────────────────────────┘                                 │
          └─ cancelled ──▶ this tick's requests that nobody waits for ──one call an engine────────────┘ abort
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from rlhf_core.cluster.wait import PROCESS_GONE
from rlhf_core.errors import DeadlineError, WorkerError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from typing import TypeAlias

    from rlhf_core.records import GenerateRequest, Generation

    _Asked: TypeAlias = tuple[GenerateRequest, asyncio.Future[Generation]]

# A group stays on its engine until that engine has this many more requests in flight than the idlest one.
AFFINITY_SLACK = 32
# Seconds on top of the engine's own limit before the router gives up on the engine itself.
GRACE_SECONDS = 30.0
ABORT_SECONDS = 60.0  # an engine that takes longer is found out by those whose requests it still has
MOST_HOMES = 10_000  # groups whose engine is remembered, far more than are in play at once


@dataclass(slots=True)
class _Lane:
    """One engine, and what it is doing."""

    handle: Any
    in_flight: int = 0
    waiting: list[_Asked] = field(default_factory=list)
    unwanted: list[str] = field(default_factory=list)  # requests the engine has, for which nobody waits any more


class EngineRouter:
    """``Generate`` over the engine actors of a run. Lives on one event loop; ``close`` cancels what is open.

    Who is cancelled while it waits takes its request back: the engine works on nothing that nobody waits for.
    """

    def __init__(self, engines: Sequence[Any], request_timeout: float) -> None:
        self._lanes = [_Lane(handle) for handle in engines]
        self._timeout = request_timeout + GRACE_SECONDS
        self._homes: dict[str, _Lane] = {}
        self._flushing = False
        self._streams: set[asyncio.Task[None]] = set()  # cancelled and awaited by close()
        self._aborts: set[asyncio.Task[None]] = set()  # end by themselves; awaited by close()

    async def generate(self, request: GenerateRequest) -> Generation:
        """See ``records.Generate``."""
        lane = self._lane(request.affinity)
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        lane.in_flight += 1
        lane.waiting.append((request, answer))
        self._flush_soon()
        try:
            return await answer
        except asyncio.CancelledError:
            lane.unwanted.append(request.request_id)
            self._flush_soon()
            raise
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
        await asyncio.sleep(0)  # who waited takes its requests back
        self._flush()
        await asyncio.gather(*self._aborts)

    def _lane(self, affinity: str) -> _Lane:
        """A group's first request goes to the idlest engine, and the group stays there while that is not much busier."""
        idlest = min(self._lanes, key=lambda lane: lane.in_flight)
        home = self._homes.setdefault(affinity, idlest)
        if len(self._homes) > MOST_HOMES:
            del self._homes[next(iter(self._homes))]  # the group that came first
        return home if home.in_flight - idlest.in_flight < AFFINITY_SLACK else idlest

    def _flush_soon(self) -> None:
        """After every task that is ready now: requests made in one tick travel, and start, together."""
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        loop = asyncio.get_running_loop()
        for lane in self._lanes:
            if lane.waiting:
                batch, lane.waiting = lane.waiting, []
                stream = loop.create_task(self._stream(lane, batch))
                self._streams.add(stream)
                stream.add_done_callback(partial(self._ended, batch))
            if lane.unwanted:
                unwanted, lane.unwanted = lane.unwanted, []
                abort = loop.create_task(_abort(lane, unwanted))
                self._aborts.add(abort)
                abort.add_done_callback(self._aborts.discard)

    def _ended(self, batch: list[_Asked], stream: asyncio.Task[None]) -> None:
        self._streams.discard(stream)
        if stream.cancelled():
            _abandon(batch)

    async def _stream(self, lane: _Lane, batch: list[_Asked]) -> None:
        try:
            chunks = aiter(lane.handle.generate_stream.remote([request for request, _ in batch]))
            while (chunk := await self._next(chunks)) is not None:
                for index, result in chunk:
                    _resolve(batch[index][1], result)
            missing: Exception = WorkerError("the engine ended its stream without an answer")
        except PROCESS_GONE as error:
            missing = WorkerError(f"an engine died while generating: {error}")
        except Exception as error:  # noqa: BLE001  handed to every request that waits for it
            missing = error
        for _, answer in batch:
            _resolve(answer, missing)

    async def _next(self, chunks: AsyncIterator[Any]) -> list[tuple[int, Generation | Exception]] | None:
        """What finished next, None at the end. Requests may queue for long: the limit is on an engine that finishes none."""
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                reference = await anext(chunks, None)
                return None if reference is None else await reference
        except TimeoutError as error:
            if not limit.expired():  # the engine's own limit, in its own words
                raise
            raise DeadlineError(
                f"an engine finished no request within {self._timeout:g} s (vllm.request_timeout)"
            ) from error


async def _abort(lane: _Lane, request_ids: list[str]) -> None:
    with contextlib.suppress(Exception):  # an engine that is gone works on nothing
        async with asyncio.timeout(ABORT_SECONDS):
            await lane.handle.abort_requests.remote(request_ids)


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
