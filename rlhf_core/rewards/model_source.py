"""A trained reward model as a ``RewardSource``. What it runs on, it does not know: each rank is an async function.

::

    samples ─▶ token ids (model_text.py) ─▶ by length, longest first ─▶ calls ─▶ rank 0 ─┐
                     └─ too long? an error of that sample                   └──▶ rank 1 ─┴─▶ scores

A rank that is free takes the next call: the longest come first, so that no rank is left alone with one in the end. Rows
of a call are of similar length, and little of it is padding.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from rlhf_core.errors import RewardError, RlhfError
from rlhf_core.records import RewardResult, RewardStatus
from rlhf_core.rewards.model_text import UnreadableError
from rlhf_core.rewards.together import together

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from rlhf_core.records import RewardRequest

    ScoreBatch: TypeAlias = Callable[[Sequence[Sequence[int]]], Awaitable[Sequence[float]]]  # rows -> one score each

MICRO_BATCHES_PER_CALL = 4  # a call is short beside its limit, and long beside what it costs to make


@dataclass(slots=True)
class _Call:
    """Rows for one rank."""

    samples: list[int]  # their indices
    rows: list[Sequence[int]]
    num_timed_out: int = 0


class ModelSource:
    """``ranks`` hold the whole model each and score one call at a time."""

    def __init__(
        self,
        ranks: Sequence[ScoreBatch],
        read: Callable[[RewardRequest], Sequence[int]],
        *,
        micro_batch_size: int,
        timeout: float,
        max_retries: int = 0,
    ) -> None:
        """A source.

        Args:
            ranks: each scores rows of token ids. What it raises is the rows' error, but an error of ours (such as
                ``WorkerError``: the process died) ends the scoring.
            read: ``TokenReader.read``.
            micro_batch_size: rows of a forward pass; a call holds ``MICRO_BATCHES_PER_CALL`` times as many.
            timeout: seconds of a call. A rank that takes longer is asked again only once it has answered after all.
            max_retries: further calls, on other ranks, for rows whose call timed out.
        """
        self._ranks = ranks
        self._busy: dict[int, asyncio.Future[Sequence[float]]] = {}  # by rank: a call that nobody waits for any more
        self._read = read
        self._rows_per_call = micro_batch_size * MICRO_BATCHES_PER_CALL
        self._timeout = timeout
        self._max_retries = max_retries
        self._turn = asyncio.Lock()  # a rank scores one call at a time: two stages at once would only queue behind it

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """See ``RewardSource``. ``seconds`` is the sample's share of its call."""
        async with self._turn:
            results: dict[int, RewardResult] = {}
            calls = await asyncio.to_thread(self._plan, requests, results)
            while calls and (free := self._free_ranks()):
                await together(self._serve(rank, calls, results) for rank in free)
            if calls:
                raise RewardError(
                    f"no rank of the reward model answered within reward.timeout={self._timeout:g} s: raise it, or lower "
                    "reward.model_micro_batch_size"
                )
            return [results[index] for index in range(len(requests))]

    async def close(self) -> None:
        """Nothing: the ranks belong to whoever made them."""

    def _plan(self, requests: Sequence[RewardRequest], results: dict[int, RewardResult]) -> deque[_Call]:
        """The calls, longest rows first; what cannot be read has its result at once."""
        rows: dict[int, Sequence[int]] = {}
        for index, request in enumerate(requests):
            try:
                rows[index] = self._read(request)
            except UnreadableError as error:
                results[index] = RewardResult(RewardStatus.ERROR, error=str(error))
        order = sorted(rows, key=lambda index: len(rows[index]), reverse=True)
        size = self._rows_per_call
        chunks = (order[start : start + size] for start in range(0, len(order), size))
        return deque(_Call(chunk, [rows[index] for index in chunk]) for chunk in chunks)

    def _free_ranks(self) -> list[int]:
        self._busy = {rank: call for rank, call in self._busy.items() if not call.done()}
        return [rank for rank in range(len(self._ranks)) if rank not in self._busy]

    async def _serve(self, rank: int, calls: deque[_Call], results: dict[int, RewardResult]) -> None:
        """One rank, until no call is left or it hangs."""
        while calls and rank not in self._busy:
            call = calls.popleft()
            started = time.monotonic()
            answer = asyncio.ensure_future(self._ranks[rank](call.rows))
            answer.add_done_callback(_look_at)
            self._busy[rank] = answer
            done, _ = await asyncio.wait([answer], timeout=self._timeout)
            if not done:
                self._put_back(call, calls, results)
                continue
            del self._busy[rank]
            try:
                scores = answer.result()
            except RlhfError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever the model raised, it is these rows' result
                text = f"the reward model raised {type(error).__name__}: {error}"
                results.update({index: RewardResult(RewardStatus.ERROR, error=text) for index in call.samples})
                continue
            results.update(_results(call, scores, time.monotonic() - started))

    def _put_back(self, call: _Call, calls: deque[_Call], results: dict[int, RewardResult]) -> None:
        call.num_timed_out += 1
        if call.num_timed_out <= self._max_retries:
            calls.appendleft(call)
            return
        text = f"the reward model did not answer within reward.timeout={self._timeout:g} s"
        results.update({index: RewardResult(RewardStatus.TIMED_OUT, error=text) for index in call.samples})


def _look_at(answer: asyncio.Future[Sequence[float]]) -> None:
    """The error of a call that came too late is no news."""
    if not answer.cancelled():
        answer.exception()


def _results(call: _Call, scores: Sequence[float], seconds: float) -> dict[int, RewardResult]:
    share = seconds / len(call.samples)
    if len(scores) != len(call.samples):
        text = f"the reward model gave {len(scores)} scores for {len(call.samples)} rows"
        return {index: RewardResult(RewardStatus.ERROR, error=text, seconds=share) for index in call.samples}
    return {index: _result(score, share) for index, score in zip(call.samples, scores, strict=True)}


def _result(score: float, seconds: float) -> RewardResult:
    if not math.isfinite(score):
        text = f"the reward model gave {score} for this sample"
        return RewardResult(RewardStatus.ERROR, error=text, seconds=seconds)
    return RewardResult(RewardStatus.OK, float(score), seconds=seconds)
