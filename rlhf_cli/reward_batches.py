"""Rows of many requests, scored together.

::

    request ─ rows ─▶ queue (bounded) ─▶ up to max_batch rows, or what came within max_wait ─▶ model, in a thread ─▶ scores
                                              while the model computes, the next batch fills up
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = get_logger(__name__)


class FullError(Exception):
    """The queue cannot hold the rows now."""


class Observer(Protocol):
    """Is told what happens."""

    def batch(self, rows: int, seconds: float) -> None:
        """A batch was scored."""
        ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    row: Sequence[int]
    score: asyncio.Future[float]


class Batcher:
    """Hands a model one batch at a time. Use it as an async context manager, in one event loop.

    Args:
        score: rows of token ids to one score each; blocks, and is called in one thread.
        max_batch: rows of a batch.
        max_wait: seconds that a batch waits for more rows once it has one.
        max_queue: rows that may wait.
        observer: is told of each batch.
    """

    def __init__(
        self,
        score: Callable[[Sequence[Sequence[int]]], list[float]],
        *,
        max_batch: int,
        max_wait: float,
        max_queue: int,
        observer: Observer,
    ) -> None:
        self.max_queue = max_queue
        self._score = score
        self._max_batch = max_batch
        self._max_wait = max_wait
        self._observer = observer
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, "reward-model")
        self._runner: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Batcher:
        self._runner = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        self._runner.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._runner
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def depth(self) -> int:
        """Rows that wait."""
        return self._queue.qsize()

    async def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """One score a row.

        Raises:
            FullError: the rows do not fit into the queue now; none of them is scored.
            Exception: what the model raised over one of them.
        """
        if self.depth + len(rows) > self.max_queue:
            raise FullError
        loop = asyncio.get_running_loop()
        waiting = [_Waiting(row, loop.create_future()) for row in rows]
        for entry in waiting:
            self._queue.put_nowait(entry)
        # All of them are waited for: an error is raised only then, so that none is left without a listener.
        scores = await asyncio.gather(*(entry.score for entry in waiting), return_exceptions=True)
        for score in scores:
            if isinstance(score, BaseException):
                raise score
        return [score for score in scores if isinstance(score, float)]

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [entry for entry in await self._next_batch() if not entry.score.done()]  # done: nobody waits for it
            if not batch:
                continue
            started = loop.time()
            scores = await loop.run_in_executor(self._thread, self._score_all, [entry.row for entry in batch])
            self._observer.batch(len(batch), loop.time() - started)
            for entry, score in zip(batch, scores, strict=True):
                if entry.score.done():
                    continue
                if isinstance(score, Exception):
                    entry.score.set_exception(score)
                else:
                    entry.score.set_result(score)

    async def _next_batch(self) -> list[_Waiting]:
        batch = [await self._queue.get()]
        until = asyncio.get_running_loop().time() + self._max_wait
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while len(batch) < self._max_batch:
                    batch.append(await self._queue.get())
        while len(batch) < self._max_batch and not self._queue.empty():
            batch.append(self._queue.get_nowait())
        return batch

    def _score_all(self, rows: Sequence[Sequence[int]]) -> list[float] | list[float | Exception]:
        """In the thread. A row over which the model raises does not spoil the others."""
        try:
            return self._score(rows)
        except Exception as error:  # noqa: BLE001 - whatever it was, it is the answer to somebody's row
            log.warning("the reward model raised %r over %d rows: each is tried alone", error, len(rows))
            return [self._score_one(row) for row in rows]

    def _score_one(self, row: Sequence[int]) -> float | Exception:
        try:
            return self._score([row])[0]
        except Exception as error:  # noqa: BLE001 - as above
            return error
