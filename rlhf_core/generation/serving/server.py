"""The server of one engine: an ``AgentServer`` that listens on the engine's own event loop from its first use on."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import uvicorn

from rlhf_core.agents.sessions import SessionStore
from rlhf_core.errors import ConfigError, WorkerError
from rlhf_core.records import Session
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from rlhf_core.generation.serving.options import ServerOptions
    from rlhf_core.generation.serving.recording import ServedEngine
    from rlhf_core.records import SessionRecord, SessionRequest

logger = get_logger(__name__)

BACKLOG = 4096  # connections that wait to be accepted: all agents of a rollout may start at once
KEEP_ALIVE_SECONDS = 120  # agents think, or run tools, between two calls
START_SECONDS = 60.0
STOP_SECONDS = 5.0
ANY_HOST = ("0.0.0.0", "::")


class SessionServer:
    """Opens and closes sessions, and serves their calls.

    Args:
        engine: that samples; the server lives on its event loop.
        options: see there.
        store_image: makes the PNG of an image of a message durable, once, and returns its path (``ImageRef.uri``); called in
            threads. None: messages with images are refused.
    """

    def __init__(
        self, engine: ServedEngine, options: ServerOptions, store_image: Callable[[bytes], str] | None = None
    ) -> None:
        self._engine = engine
        self._store_image = store_image
        self._options = options
        self._store = SessionStore()
        self._url = ""
        self._uvicorn: Any = None
        self._task: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> str:
        """Listen, unless it does already. Returns the base URL, which ends in /v1.

        Raises:
            ConfigError: the host cannot be listened on.
            WorkerError: the server did not start.
        """
        async with self._starting:
            if not self._url:
                await self._listen()
        return self._url

    async def open_session(self, request: SessionRequest) -> Session:
        """See ``AgentServer``."""
        await self._engine.check_health()
        url = await self.start()
        longest = min(request.max_len, self._engine.client.model_config.max_model_len)
        _, key = self._store.open(replace(request, max_len=longest))
        return Session(request.session_id, url, key)

    async def rewards_posted(self, session_ids: Sequence[str], seconds: float) -> list[str]:
        """Which of the sessions were given their reward with ``done``; waits so long for the first one."""
        waiting = [
            asyncio.ensure_future(session.rewarded.wait())
            for session_id in session_ids
            if (session := self._store.get(session_id)) is not None
        ]
        if waiting:
            await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        else:  # all closed meanwhile: whoever asks in a loop must not spin
            await asyncio.sleep(seconds)
        for task in waiting:
            task.cancel()
        return [name for name in session_ids if (live := self._store.get(name)) is not None and live.rewarded.is_set()]

    async def reward_posted(self, session_id: str, seconds: float) -> bool:
        """See ``AgentServer``."""
        return bool(await self.rewards_posted([session_id], seconds))

    async def close_session(self, session_id: str) -> SessionRecord:
        """See ``AgentServer``."""
        session = self._store.get(session_id)
        calls = list(session.open_calls.values()) if session is not None else []
        record = self._store.close(session_id)
        for call in calls:  # the record is made: what the engine still says is not listened to
            await self._engine.abort(call.name)
        return record

    async def close_all(self) -> None:
        """Nobody waits for any session any more."""
        for session_id in self._store.open_ids():
            await self.close_session(session_id)

    async def stop(self) -> None:
        """End all sessions and free the port."""
        await self.close_all()
        task, self._task, self._url = self._task, None, ""
        if task is None:
            return
        self._uvicorn.should_exit = True
        done, _ = await asyncio.wait([task], timeout=2 * STOP_SECONDS)
        if not done:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _listen(self) -> None:
        # vLLM's serving classes take seconds to import: not on the engine's event loop.
        app = await asyncio.to_thread(import_module, "rlhf_core.generation.serving.app")
        _allow_open_files()
        bound = _bind(self._options.host)
        config = uvicorn.Config(
            app.make_app(self._engine, self._store, self._options, self._store_image),
            access_log=False,
            log_config=None,
            lifespan="off",
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(STOP_SECONDS),
        )
        self._uvicorn = _Uvicorn(config)
        self._task = asyncio.create_task(self._uvicorn.serve(sockets=[bound]))
        up = asyncio.ensure_future(self._uvicorn.up.wait())
        await asyncio.wait([self._task, up], timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            up.cancel()
            self._uvicorn.should_exit = True
            bound.close()
            raise WorkerError(f"the OpenAI-compatible server did not start within {START_SECONDS:g} s")
        self._url = f"http://{self._shown_host()}:{bound.getsockname()[1]}/v1"
        logger.info("sessions are served at %s", self._url)

    def _shown_host(self) -> str:
        host = self._options.host
        shown = (self._options.advertised_host or socket.gethostname()) if host in ANY_HOST else host
        return f"[{shown}]" if ":" in shown else shown


def _bind(host: str) -> socket.socket:
    """A socket on a port of the system's choice."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"agent.server.host={host!r} is no address of this machine: {error}") from error
    try:
        bound.bind(address)
        bound.set_inheritable(False)
    except OSError as error:
        bound.close()
        raise ConfigError(f"agent.server.host={host!r} cannot be listened on: {error}") from error
    return bound


def _allow_open_files() -> None:
    """A connection is an open file; many systems allow 1024 unless asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # what there is must do
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Uvicorn(uvicorn.Server):
    """Says when it is up, and leaves signals to the worker, whose business they are."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn's."""
        await super().startup(sockets=sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Does nothing."""
        yield
