"""From episodes to the OpenAI-compatible servers of the engines: each session lives on one engine, from its opening on.

::

    executor ──open_session──▶ the group's engine, while it has not many more open sessions than the idlest
    agent    ══HTTP══════════▶ that engine's own server: calls do not pass through here
    executor ──close_session─▶ the same engine
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf_core.cluster.wait import PROCESS_GONE, one
from rlhf_core.errors import DeadlineError, WorkerError
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.records import Session, SessionRecord, SessionRequest

logger = get_logger(__name__)

# A group stays on its engine, which has its prompt in the prefix cache, until that one has so many more sessions open.
AFFINITY_SLACK = 8
OPEN_SECONDS = 120.0  # the first session starts the server, whose imports take seconds, on a busy machine many
CLOSE_SECONDS = 60.0
ASK_SECONDS = 1.0  # how long one question for posted rewards waits: what starts to wait meanwhile is in the next one
TIDY_SECONDS = 10.0
MOST_HOMES = 10_000  # groups, and sessions, whose engine is remembered: far more than are in play at once


@dataclass(slots=True)
class _Home:
    """One engine, and the sessions that live there."""

    handle: Any
    open: set[str] = field(default_factory=set)
    waiting: dict[str, asyncio.Future[bool]] = field(default_factory=dict)  # for a posted reward, by session
    asking: asyncio.Task[None] | None = None


class SessionRouter:
    """``AgentServer`` over the engine actors of a run. Lives on one event loop; ``close`` ends what is open."""

    def __init__(self, engines: Sequence[Any], slack: int = AFFINITY_SLACK) -> None:
        self._homes = [_Home(handle) for handle in engines]
        self._slack = slack
        self._home_of_group: dict[str, _Home] = {}
        self._home_of: dict[str, _Home] = {}  # sessions that were closed lately too: closing twice is allowed

    async def open_session(self, request: SessionRequest) -> Session:
        """See ``AgentServer``."""
        home = self._choose(request.affinity)
        self._home_of[request.session_id] = home
        self._forget_closed()
        home.open.add(request.session_id)
        what = f"opening session {request.session_id}"
        try:
            session: Session = await one(home.handle.open_session.remote(request), OPEN_SECONDS, what)
        except DeadlineError as error:
            raise WorkerError(f"{error}: the engine hangs") from error
        except BaseException:
            home.open.discard(request.session_id)
            raise
        return session

    async def reward_posted(self, session_id: str, seconds: float) -> bool:
        """See ``AgentServer``."""
        home = self._home_of[session_id]
        answer = home.waiting.setdefault(session_id, asyncio.get_running_loop().create_future())
        if home.asking is None or home.asking.done():
            home.asking = asyncio.create_task(self._ask(home))
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(answer)
        except TimeoutError:
            return False
        finally:
            home.waiting.pop(session_id, None)

    async def close_session(self, session_id: str) -> SessionRecord:
        """See ``AgentServer``.

        Raises:
            WorkerError: the engine is gone, and with it what the session held.
        """
        home = self._home_of[session_id]
        what = f"closing session {session_id}"
        try:
            record: SessionRecord = await one(home.handle.close_session.remote(session_id), CLOSE_SECONDS, what)
        except DeadlineError as error:
            raise WorkerError(f"{error}: the engine hangs") from error
        home.open.discard(session_id)
        return record

    async def close(self) -> None:
        """End what is open; an engine that does not listen is left to the session of the run, which rebuilds it."""
        for home in self._homes:
            if home.asking is not None:
                home.asking.cancel()
            for answer in home.waiting.values():
                answer.cancel()
        calls = [home.handle.close_session.remote(session_id) for home in self._homes for session_id in home.open]
        if calls:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TIDY_SECONDS):
                    await asyncio.gather(*calls, return_exceptions=True)

    def _choose(self, group: str) -> _Home:
        """A group's first session goes to the idlest engine, and the group stays there while that is not much busier."""
        idlest = min(self._homes, key=lambda home: len(home.open))
        home = self._home_of_group.setdefault(group, idlest)
        if len(self._home_of_group) > MOST_HOMES:
            del self._home_of_group[next(iter(self._home_of_group))]  # the group that came first
        return home if len(home.open) - len(idlest.open) < self._slack else idlest

    def _forget_closed(self) -> None:
        """Of the older half of the sessions, those that are over."""
        if len(self._home_of) > MOST_HOMES:
            older = list(self._home_of.items())[: MOST_HOMES // 2]
            for session_id in [session_id for session_id, home in older if session_id not in home.open]:
                del self._home_of[session_id]

    async def _ask(self, home: _Home) -> None:
        """One question at a time for all sessions that wait: a question each would fill the actor with idle calls."""
        try:
            while home.waiting:
                asked = home.handle.rewards_posted.remote(list(home.waiting), ASK_SECONDS)
                for session_id in await one(asked, OPEN_SECONDS, "asking an engine for posted rewards"):
                    _resolve(home.waiting.get(session_id), True)
        except (DeadlineError, WorkerError, *PROCESS_GONE) as error:
            failure = WorkerError(f"an engine is gone while rewards were waited for: {error}")
            for answer in home.waiting.values():
                _resolve(answer, failure)


def _resolve(answer: asyncio.Future[bool] | None, result: bool | Exception) -> None:
    if answer is None or answer.done():
        return
    if isinstance(result, Exception):
        answer.set_exception(result)
    else:
        answer.set_result(result)
