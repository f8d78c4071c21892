"""Environments and agents, each in a process of its own that lives for one episode.

::

    pool.open(seed) ──▶ wait for a slot ──▶ fork ──▶ instance ──call("reset")── call("step") ...──▶ close ──▶ killed

One process imports the user's file; each episode gets a fork of it, which takes milliseconds and shares its memory. So what the
file loads when it is imported is there for all, and nothing that an episode changes is seen by another.
"""

from __future__ import annotations

import asyncio
import resource
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import AgentDeadlineError, AgentError, ConfigError
from rlhf_core.processes.forked import ForkedProcess, LostProcessError
from rlhf_core.processes.forking import Template
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

log = get_logger(__name__)

START_ATTEMPTS = 3  # a process may be killed while it starts, for want of memory; three in a row is no accident
CLOSE_SECONDS = 10.0  # ``close`` may take that long at most: the episode is over, and its rows wait for it
DESCRIPTORS = 3  # that this process holds for each of the others
OTHER_DESCRIPTORS = 200  # that this process holds otherwise
MAX_TRACES = 100  # different errors whose traceback is logged


class EnvironmentPool:
    """An ``EnvironmentSource``. Belongs to one event loop, and never blocks it."""

    def __init__(
        self,
        entry: str,
        argument: Any,
        *,
        max_processes: int,
        step_timeout: float,
        name: str = "the agent",
        timeout_key: str = "agent.step_timeout",
    ) -> None:
        """Nothing is started yet.

        Args:
            entry: ``module:function`` of this project. Called with ``argument``, once and before the forks, it imports the
                user's file and returns a factory: ``factory(seed)`` makes the instance of an episode. Its methods take one
                dictionary and answer JSON (bytes are allowed), plain or ``async``; a plain one runs outside any event loop.
            argument: JSON.
            max_processes: episodes at once.
            step_timeout: seconds that making the instance, or one call, may take.
            name: of what runs here, for messages and the log.
            timeout_key: the key of the configuration that gave ``step_timeout``.

        Raises:
            ConfigError: so many processes need more descriptors than this process may have.
        """
        _check_descriptors(max_processes)
        self._entry = entry
        self._argument = argument
        self._limit = step_timeout
        self._name = name
        self._timeout_key = timeout_key
        self._slots = asyncio.Semaphore(max_processes)
        self._starting = asyncio.Lock()
        self._template: Template | None = None
        self._running: set[ForkedProcess] = set()
        self._traced: set[str] = set()
        self._closed = False

    @property
    def processes(self) -> int:
        """Processes of episodes that exist now."""
        return len(self._running)

    async def start(self) -> None:
        """Import the user's file. ``open`` does so too, if need be.

        Raises:
            ConfigError: it cannot be imported; the message names file and line.
            AgentError: the process that imports it is lost, again and again; or the pool is closed.
        """
        await self._ready_template()

    @asynccontextmanager
    async def open(self, seed: int) -> AsyncIterator[IsolatedEnvironment]:
        """One environment, for one episode. Waits while ``max_processes`` others run.

        Its ``close`` is called when the block ends, whatever happened, unless its process is gone, or the block was
        cancelled: then the process is killed at once.

        Args:
            seed: ``random``, numpy and torch are seeded with it before the instance is made.

        Raises:
            AgentError: it cannot be made.
            AgentDeadlineError: it takes too long.
        """
        process = await self._fork()
        try:
            environment = IsolatedEnvironment(process, self._limit, self._name, self._timeout_key, self._traced)
            await environment.make(seed)
            try:
                yield environment
            except Exception:
                await self._end(environment)
                raise
            else:
                await self._end(environment)
        finally:
            process.kill()

    async def close(self) -> None:
        """Kill all that runs, and wait until it is gone. A second call does nothing."""
        self._closed = True
        async with self._starting:
            template, self._template = self._template, None
        if template is not None:
            await template.close()

    async def _end(self, environment: IsolatedEnvironment) -> None:
        """Close the instance. The episode is over: a failure here is worth a warning, not the sample."""
        if not environment.alive:
            return
        try:
            await environment.call("close", {}, seconds=min(self._limit, CLOSE_SECONDS))
        except AgentError as error:
            log.warning("%s: an episode is over, but %s", self._name, error)

    async def _fork(self) -> ForkedProcess:
        """A process with a slot, which is free again when the process is gone."""
        await self._slots.acquire()
        try:
            process = await self._forked()
        except BaseException:
            self._slots.release()
            raise
        self._running.add(process)
        process.ended.add_done_callback(lambda _: self._release(process))
        return process

    def _release(self, process: ForkedProcess) -> None:
        self._running.discard(process)
        self._slots.release()

    async def _forked(self) -> ForkedProcess:
        for attempt in range(1, START_ATTEMPTS + 1):
            template = await self._ready_template()
            try:
                return await template.fork()
            except LostProcessError as error:
                if attempt == START_ATTEMPTS or self._closed:
                    raise AgentError(f"{self._name}: no process can be started: its process {error}") from error
                log.info("%s: a process could not be started: its process %s", self._name, error)
        raise AssertionError("unreachable")

    async def _ready_template(self) -> Template:
        """The template; another one if it is gone."""
        async with self._starting:
            if self._closed:
                raise AgentError(f"{self._name}: the pool of its processes is closed")
            if self._template is not None and not self._template.alive:
                log.warning(
                    "%s: process %d, from which the others are forked, was lost", self._name, self._template.pid
                )
                await self._template.close()
                self._template = None
            if self._template is None:
                self._template = await self._start_template()
            return self._template

    async def _start_template(self) -> Template:
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                return await Template.start(self._entry, self._argument, name=self._name)
            except LostProcessError as error:
                if attempt == START_ATTEMPTS:
                    raise AgentError(
                        f"{self._name} cannot be imported, after {attempt} attempts: its process {error}"
                    ) from error
        raise AssertionError("unreachable")


class IsolatedEnvironment:
    """One instance in its process. One call at a time."""

    def __init__(self, process: ForkedProcess, limit: float, name: str, timeout_key: str, traced: set[str]) -> None:
        self._process = process
        self._limit = limit
        self._name = name
        self._timeout_key = timeout_key
        self._traced = traced

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """False once its process was killed or has ended."""
        return self._process.alive

    async def make(self, seed: int) -> None:
        """Make the instance; see ``call``."""
        await self._exchange({"make": seed}, "making it", self._limit)

    async def call(self, method: str, payload: dict[str, Any], seconds: float | None = None) -> Any:
        """Call a method of the instance.

        Args:
            method: its name.
            payload: JSON; bytes are allowed as values.
            seconds: the limit; default: the pool's.

        Returns:
            What the method returned: JSON, and bytes. Tuples, arrays and tensors are lists by then.

        Raises:
            AgentError: it raised (it may still be called), or its process died.
            AgentDeadlineError: it took too long; its process is gone.
        """
        return await self._exchange({"method": method, "payload": payload}, f"{method}()", seconds or self._limit)

    async def _exchange(self, message: dict[str, Any], what: str, limit: float) -> Any:
        if not self._process.alive:
            raise AgentError(f"{self._name}: {what} cannot be called: its process is gone")
        try:
            async with asyncio.timeout(limit):
                reply = await self._process.request(message)
        except TimeoutError:
            await self._process.kill_hung()
            key = self._timeout_key
            shown = f"{key}={limit:g} s" if limit == self._limit else f"{limit:g} s"
            raise AgentDeadlineError(f"{self._name}: {what} took more than {shown}; its process was killed") from None
        except LostProcessError as error:
            raise AgentError(f"{self._name}: in {what} its process {error}") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise AgentError(f"{self._name}: what {what} is given cannot be sent: {error}") from error
        except BaseException:
            self._process.kill()  # cancelled: what it still answers would be taken for the answer to the next call
            raise
        if "refused" in reply:
            raise AgentError(f"{self._name}: {what}: {reply['refused']}")
        if "raised" in reply:
            self._log_trace(reply)
            raise AgentError(f"{self._name}: {what} raised {reply['raised']}")
        return reply["result"]

    def _log_trace(self, reply: dict[str, Any]) -> None:
        """The traceback of an error, once for each."""
        if reply["raised"] not in self._traced and len(self._traced) < MAX_TRACES:
            self._traced.add(reply["raised"])
            log.warning("%s raised, first of its kind:\n%s", self._name, reply["trace"])


def _check_descriptors(max_processes: int) -> None:
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS * max_processes + OTHER_DESCRIPTORS
    if allowed != resource.RLIM_INFINITY and wanted > allowed:
        raise ConfigError(
            f"agent.max_processes={max_processes} needs {wanted} open files, and this process may have {allowed}: raise "
            "the limit (ulimit -n), or set fewer"
        )
