"""Reward servers as a ``RewardSource``: each request is answered by one of them.

::

    samples ─▶ requests of reward.remote_batch_size ─▶ the next server in turn ─▶ typed rows (answers.py)
                                                          │
              no connection, 502, 503 ────────────────────┤ another server; then all again, ever later
              another 5xx, a broken connection ───────────┤ the same, MAX_BROKEN calls at most
              no answer within reward.timeout ────────────┤ one other server, and reward.max_retries more calls
              4xx, a redirect, no JSON ───────────────────┘ none: an error of these samples

A request of several samples that fails is tried once more with each of them alone.

Everything ends. A request takes at most ``(2 + reward.max_retries) × reward.timeout`` seconds. If no server answered
anything in the second half of that time, or in ``MAX_SILENCE`` calls that hung or broke, ``RewardError`` ends the scoring
at once, whatever else waits.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import RewardError
from rlhf_core.records import RewardResult, RewardStatus
from rlhf_core.rewards.answers import SERVER, to_rows
from rlhf_core.rewards.http_call import CallError, Failure, body_of, make_clients, post
from rlhf_core.rewards.http_servers import Servers, pause
from rlhf_core.rewards.together import together

if TYPE_CHECKING:
    from collections.abc import Sequence

    import httpx

    from rlhf_core.records import RewardRequest
    from rlhf_core.rewards.answers import Row
    from rlhf_core.rewards.http_servers import Server

MAX_BROKEN = 5  # calls: a server that breaks over the same samples so often does so because of them


class HttpSource:
    """``urls`` share the samples. Belongs to the event loop of its first ``score``."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str | None = None,
        batch_size: int = 1,
        concurrency: int = 64,
        timeout: float = 60,
        max_retries: int = 0,
    ) -> None:
        self._servers = Servers(urls)
        self._token = token
        self._batch_size = batch_size
        self._concurrency = concurrency
        self._timeout = timeout
        self._max_retries = max_retries
        self._clients: list[httpx.AsyncClient] = []
        self._free: asyncio.LifoQueue[httpx.AsyncClient] = asyncio.LifoQueue()  # to have one is to have a turn

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """See ``RewardSource``. ``seconds`` is the sample's share of its request, waiting for a turn left out."""
        if not self._clients:
            self._clients = make_clients(self._concurrency, self._token)
            for client in self._clients:
                self._free.put_nowait(client)
        batches = [requests[start : start + self._batch_size] for start in range(0, len(requests), self._batch_size)]
        scored = await together(self._score_batch(batch) for batch in batches)
        return [result for results in scored for result in results]

    async def close(self) -> None:
        """Close the connections."""
        clients, self._clients, self._free = self._clients, [], asyncio.LifoQueue()
        await together(client.aclose() for client in clients)

    async def _score_batch(self, samples: Sequence[RewardRequest]) -> list[RewardResult]:
        try:
            body = body_of(samples)
        except (TypeError, ValueError) as error:
            failure, message, seconds = Failure.REFUSED, f"the sample cannot be sent as JSON: {error}", 0.0
        else:
            client = await self._free.get()
            started = time.monotonic()
            try:
                rows = to_rows(await self._ask(client, body), len(samples), SERVER)
                seconds = (time.monotonic() - started) / len(samples)
                return [_result(row, seconds) for row in rows]
            except CallError as error:
                failure, message = error.failure, self._without_token(str(error))
                seconds = (time.monotonic() - started) / len(samples)
            finally:
                self._free.put_nowait(client)
        if len(samples) > 1 and failure is not Failure.UNAVAILABLE:
            alone = await together(self._score_batch([sample]) for sample in samples)
            return [result for results in alone for result in results]
        status = RewardStatus.TIMED_OUT if failure is Failure.TIMED_OUT else RewardStatus.ERROR
        return [RewardResult(status, error=message, seconds=seconds) for _ in samples]

    async def _ask(self, client: httpx.AsyncClient, body: bytes) -> Any:
        """The JSON that some server answered, or the ``CallError`` of the last call; ``RewardError`` if all are lost."""
        plan = _Plan(self._timeout, self._max_retries, len(self._servers))
        while True:
            server = await self._servers.take(plan.tried, plan.patience)
            if server is None:
                break
            try:
                return await self._call(client, server, body, plan.limit())
            except CallError as error:
                plan.note(server, error)
            if not plan.may_go_on() or (plan.num_timed_out and self._servers.silent):
                break
            await asyncio.sleep(plan.rest())
        self._check_alive(plan)
        raise plan.error

    async def _call(self, client: httpx.AsyncClient, server: Server, body: bytes, limit: float) -> Any:
        started = time.monotonic()
        try:
            answer = await post(client, server.url, body, limit)
        except CallError as error:
            if error.failure is Failure.REFUSED:  # it answered, though not what was asked
                self._servers.note_answer(server)
            else:
                self._servers.note_failure(server, started, self._without_token(str(error)))
            raise CallError(error.failure, f"{server.name}: {error}") from error
        finally:
            self._servers.give_back(server)
        self._servers.note_answer(server)
        return answer

    def _check_alive(self, plan: _Plan) -> None:
        """A failed request is its samples' error, unless no server answers anybody."""
        lost = self._servers.silent
        if plan.error.failure is Failure.UNAVAILABLE:  # not since it began: then they may just have lived still
            lost = not self._servers.answered_since((plan.started + time.monotonic()) / 2)
        if lost and plan.error.failure is not Failure.REFUSED:
            raise RewardError(
                f"no reward server answers ({self._servers.describe()}): start one, or correct reward.remote_url"
            )

    def _without_token(self, text: str) -> str:
        """Servers may quote what they were sent."""
        return text if self._token is None else text.replace(self._token, "***")


class _Plan:
    """The calls of one request so far, and whether there is another."""

    def __init__(self, timeout: float, max_retries: int, num_servers: int) -> None:
        self.started = time.monotonic()
        self.patience = self.started + timeout * (1 + max_retries)  # no call begins later, but for a fail-over
        self.tried: set[Server] = set()
        self.num_timed_out = 0
        self.error = CallError(Failure.UNAVAILABLE, "every reward server is avoided because it failed")
        self._end = self.patience + timeout
        self._timeout = timeout
        self._max_timed_out = max_retries + (1 if num_servers > 1 else 0)
        self._num_servers = num_servers
        self._num_broken = 0
        self._rounds = 0

    def limit(self) -> float:
        """Seconds that a call may take now."""
        return min(self._timeout, self._end - time.monotonic())

    def note(self, server: Server, error: CallError) -> None:
        """A call failed."""
        self.error = error
        self.tried.add(server)
        self.num_timed_out += error.failure is Failure.TIMED_OUT
        self._num_broken += error.failure is Failure.BROKEN

    def may_go_on(self) -> bool:
        """True if the last failure allows another call."""
        now = time.monotonic()
        match self.error.failure:
            case Failure.UNAVAILABLE:
                return now < self.patience
            case Failure.BROKEN:
                return now < self.patience and self._num_broken < MAX_BROKEN
            case Failure.TIMED_OUT:
                return now < self._end and self.num_timed_out <= self._max_timed_out
            case Failure.REFUSED:
                return False

    def rest(self) -> float:
        """Seconds to wait before the next call: none while there is an untried server, then ever longer."""
        if len(self.tried) < self._num_servers:
            return 0.0
        self.tried.clear()
        self._rounds += 1
        return min(pause(self._rounds), max(0.0, self.patience - time.monotonic()))


def _result(row: Row, seconds: float) -> RewardResult:
    status = RewardStatus.OK if row.error is None else RewardStatus.ERROR
    return RewardResult(status, row.reward, row.score, row.metrics, row.error, seconds)
