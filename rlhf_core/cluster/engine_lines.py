"""The lines from the executors of a worker to the engines: made once for each set of engines, shared by all that runs on it.

::

    rollout ────┐                 ┌─ EngineRouter ───▶ requests
                ├──▶ EngineLine ──┤                               engines, as the session names them
    evaluation ─┘                 └─ SessionRouter ──▶ sessions of OpenAI agents

An engine that is met for the first time may be busy for an earlier process that is gone: it drops what it has. One that is
known keeps it: those requests are of somebody who waits. A line to engines of which one was made anew is left to those who are
on it still, and ends with them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.cluster.router import EngineRouter
from rlhf_core.cluster.session_router import SessionRouter
from rlhf_core.cluster.wait import all_of
from rlhf_core.errors import WorkerError

if TYPE_CHECKING:
    from collections.abc import Sequence

ANSWER_SECONDS = 120.0  # an engine that is asked for its version, or to drop its requests


@dataclass(frozen=True, slots=True)
class EngineLine:
    """How executors reach a set of engines."""

    engines: tuple[Any, ...]
    generate: EngineRouter
    server: SessionRouter | None  # None: the agent needs none

    async def oldest_version(self, least: int) -> int:
        """The oldest policy version that an engine speaks with now, at least ``least``.

        Raises:
            WorkerError: an engine is gone, or cannot speak.
        """
        calls = [engine.version.remote() for engine in self.engines]
        held = await all_of(calls, ANSWER_SECONDS, "the versions of the engines")
        if any(version < least for version in held):
            raise WorkerError(f"the engines speak with versions {held}, none of which may be older than {least}")
        return min(held, default=least)


class EngineLines:
    """The line to the engines that a call names; made anew where they are others."""

    def __init__(self, request_timeout: float, *, with_server: bool) -> None:
        self._request_timeout = request_timeout
        self._with_server = with_server
        self._line: EngineLine | None = None
        self._meeting = asyncio.Lock()

    async def to(self, engines: Sequence[Any]) -> EngineLine:
        """The line to these engines.

        Raises:
            WorkerError: an engine is gone.
        """
        async with self._meeting:
            known = () if self._line is None else self._line.engines
            if self._line is None or known != tuple(engines):
                met = [engine.drop_requests.remote() for engine in engines if engine not in known]
                await all_of(met, ANSWER_SECONDS, "dropping what earlier processes asked of the engines")
                server = SessionRouter(engines) if self._with_server else None
                self._line = EngineLine(tuple(engines), EngineRouter(engines, self._request_timeout), server)
            return self._line
