"""One reward function as a ``RewardSource``: batches, retries, and a bad sample kept from its neighbours.

::

    samples ─▶ batches of reward.batch_size ─▶ call ─▶ rows
    (a group-wise function: one batch a group)   │
                                                 └─ timed out, raised or died? each of its samples alone, once

How often a sample is tried is bounded: once in its batch, then ``1 + reward.max_retries`` times alone (further
attempts only after a time-out or a dead worker; a function that raises would raise again). A group is never split,
so a group-wise call that fails is only retried. If MAX_HANGS calls of one sample or group in a row run into the
limit, something that all of them need hangs: those that still wait to be tried alone are then ``timed_out``
untried, so that the stage ends.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rlhf_core.records import RewardResult, RewardStatus
from rlhf_core.rewards.process import CallKind, CallOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.records import RewardRequest
    from rlhf_core.rewards.answers import Row
    from rlhf_core.rewards.pool import WorkerPool

MAX_HANGS = 32  # as the default of rollout.max_consecutive_failures

Unit = list[int]  # indices of samples that may not be separated: one sample, or one group
Scored = list[tuple[int, RewardResult]]  # index and result


class FunctionSource:
    """The function with index ``function`` of a pool. ``score`` leaves ``score`` None where the function gives none."""

    def __init__(self, pool: WorkerPool, function: int, *, batch_size: int, max_retries: int) -> None:
        self._pool = pool
        self._function = function
        self._batch_size = batch_size
        self._max_retries = max_retries

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """See ``RewardSource``. ``seconds`` is the sample's share of its call."""
        if not requests:
            return []
        group_wise = (await self._pool.group_wise())[self._function]
        batches = _groups(requests) if group_wise else _chunks(len(requests), self._batch_size)
        isolation = _Isolation(self._pool.num_workers)
        scored = await asyncio.gather(*(self._score_batch(requests, batch, isolation) for batch in batches))
        results = dict(pair for pairs in scored for pair in pairs)
        return [results[index] for index in range(len(requests))]

    async def close(self) -> None:
        """Close the pool, which the functions of a run share."""
        await self._pool.close()

    async def _score_batch(self, requests: Sequence[RewardRequest], units: list[Unit], isolation: _Isolation) -> Scored:
        if len(units) == 1:
            return await self._score_alone(requests, units[0], isolation)
        batch = [index for unit in units for index in unit]
        outcome = await self._call(requests, batch)
        if outcome.kind is CallKind.ANSWERED:
            return _scored(batch, outcome)
        alone = await asyncio.gather(*(self._score_alone(requests, unit, isolation) for unit in units))
        return [pair for pairs in alone for pair in pairs]

    async def _score_alone(self, requests: Sequence[RewardRequest], unit: Unit, isolation: _Isolation) -> Scored:
        async with isolation.turn:
            if isolation.hopeless:
                return _scored(unit, _UNTRIED)
            outcome = await self._call_with_retries(requests, unit)
            isolation.note(outcome)
            return _scored(unit, outcome)

    async def _call_with_retries(self, requests: Sequence[RewardRequest], unit: Unit) -> CallOutcome:
        outcome = await self._call(requests, unit)
        for _ in range(self._max_retries):
            if outcome.kind not in (CallKind.TIMED_OUT, CallKind.DIED):
                break
            outcome = await self._call(requests, unit)
        return outcome

    async def _call(self, requests: Sequence[RewardRequest], indices: list[int]) -> CallOutcome:
        samples = [requests[index] for index in indices]
        return await self._pool.call(
            self._function,
            {
                "queries": [sample.query for sample in samples],
                "prompts": [sample.prompt for sample in samples],
                "labels": [sample.label for sample in samples],
                "answers": [sample.answer for sample in samples],
                "datasources": [sample.datasource for sample in samples],
            },
        )


class _Isolation:
    """The units of one ``score`` that are tried alone: as many at a time as there are workers, until it is hopeless."""

    def __init__(self, num_workers: int) -> None:
        self.turn = asyncio.Semaphore(num_workers)
        self._hangs = 0

    @property
    def hopeless(self) -> bool:
        return self._hangs >= MAX_HANGS

    def note(self, outcome: CallOutcome) -> None:
        self._hangs = self._hangs + 1 if outcome.kind is CallKind.TIMED_OUT else 0


_UNTRIED = CallOutcome(
    CallKind.TIMED_OUT, error=f"not tried alone: {MAX_HANGS} calls in a row had run into reward.timeout"
)


def _chunks(num_samples: int, size: int) -> list[list[Unit]]:
    return [
        [[index] for index in range(start, min(start + size, num_samples))] for start in range(0, num_samples, size)
    ]


def _groups(requests: Sequence[RewardRequest]) -> list[list[Unit]]:
    groups: dict[str, Unit] = {}
    for index, request in enumerate(requests):
        groups.setdefault(request.group_id, []).append(index)
    return [[unit] for unit in groups.values()]


def _scored(indices: list[int], outcome: CallOutcome) -> Scored:
    seconds = outcome.seconds / len(indices)
    if outcome.kind is CallKind.ANSWERED:
        return [(index, _from_row(row, seconds)) for index, row in zip(indices, outcome.rows, strict=True)]
    status = RewardStatus.TIMED_OUT if outcome.kind is CallKind.TIMED_OUT else RewardStatus.ERROR
    return [(index, RewardResult(status, error=outcome.error, seconds=seconds)) for index in indices]


def _from_row(row: Row, seconds: float) -> RewardResult:
    status = RewardStatus.OK if row.error is None else RewardStatus.ERROR
    return RewardResult(status, row.reward, row.score, row.metrics, row.error, seconds)
