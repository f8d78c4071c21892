"""Templates, from the controller's side. They belong to one event loop, and never block it.

::

    Template.start ──▶ template process (template.py) ──fork()──▶ ForkedProcess ──call()──▶ instance of the user's
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from typing import Any

from rlhf_core.errors import ConfigError
from rlhf_core.processes.forked import ForkedProcess, LostProcessError
from rlhf_core.processes.owned import EXIT_SECONDS, OwnedProcess
from rlhf_core.processes.template import ENVIRONMENT, MAX_PACKET
from rlhf_core.telemetry import get_logger

log = get_logger(__name__)

START_SECONDS = 300.0  # for importing the user's file: it may import a deep-learning framework


class _ThreadsError(Exception):
    """The template has threads, so it must not fork; the message names them."""


class Template:
    """A process that has loaded ``entry`` and forks. Make it with ``start``."""

    def __init__(self, entry: str, argument: Any, *, name: str, late: bool = False) -> None:
        self._name = name
        self._process = OwnedProcess(
            "rlhf_core.processes.template", kind=socket.SOCK_SEQPACKET, environment=ENVIRONMENT
        )
        self._channel = self._process.channel
        self._channel.setblocking(False)
        self._request = {"entry": entry, "argument": argument, "late": late}
        self._loop = asyncio.get_running_loop()
        self._forks: dict[int, ForkedProcess] = {}
        self._forked = 0
        self._loaded = False
        self._forking = asyncio.Lock()  # the template forks one at a time; so its channel is never full
        self._reply: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._ended = asyncio.Event()
        self._loop.add_reader(self._channel, self._hear)
        self._loop.add_reader(self._process.output.fd, self._print)

    @classmethod
    async def start(cls, entry: str, argument: Any, *, name: str) -> Template:
        """A template that can fork.

        Args:
            entry: ``module:function``, called with the argument: gives the factory of instances (see ``serving.py``).
            argument: JSON.
            name: of what its children are, for the log.

        Raises:
            ConfigError: the function raised it, or something else while it imported the user's file.
            LostProcessError: the process ended before it could say.
        """
        try:
            return await cls._start_one(entry, argument, name=name, late=False)
        except _ThreadsError as error:
            log.warning(
                "%s starts threads while it is imported (%s); a process with threads cannot be forked safely, so every "
                "episode imports it anew: start them in the class instead",
                name,
                error,
            )
            return await cls._start_one(entry, argument, name=name, late=True)

    @classmethod
    async def _start_one(cls, entry: str, argument: Any, *, name: str, late: bool) -> Template:
        template = cls(entry, argument, name=name, late=late)
        try:
            await template._load()
        except BaseException:
            await template.close()
            raise
        return template

    @property
    def pid(self) -> int:
        """Of the template's process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """False once it is gone: its forks are gone with it."""
        return not self._ended.is_set()

    async def fork(self) -> ForkedProcess:
        """A new process, in which the factory is ready.

        Raises:
            ConfigError: the user's file was imported in the new process, in vain.
            LostProcessError: the template or the process is gone, or no process can be forked.
        """
        async with self._forking:
            process = self._begin_fork()
            try:
                await process.forked
            except BaseException:
                process.kill()
                raise
        if process.failure is not None:
            process.kill()
            raise LostProcessError(process.failure)
        try:
            async with asyncio.timeout(START_SECONDS):
                reply = await process.receive()
        except TimeoutError:
            process.kill()
            raise LostProcessError(f"took more than {START_SECONDS:g} s to begin") from None
        except BaseException:
            process.kill()
            raise
        if "error" in reply:
            process.kill()
            raise ConfigError(reply["error"])
        return process

    async def close(self) -> None:
        """End the template and all its forks. A second call does nothing."""
        for process in list(self._forks.values()):
            process.kill()
        lost = not self.alive
        if self._loaded:  # else it is in code of the user's, and has no forks
            with contextlib.suppress(OSError):
                self._channel.shutdown(socket.SHUT_WR)  # it then kills what is left, and ends
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_SECONDS):
                    await self._ended.wait()
        self._end()
        if await asyncio.to_thread(self._process.kill):
            self._log(self._process.output.take(), self.pid, logging.WARNING if lost else logging.INFO)

    # --- what the template says --------------------------------------------------------------------------------------

    async def _load(self) -> None:
        try:
            self._channel.send(json.dumps(self._request).encode())
        except OSError as error:
            raise ConfigError(f"{self._name}: its arguments cannot be sent: {error}") from error
        try:
            async with asyncio.timeout(START_SECONDS):
                reply = await self._reply
        except TimeoutError:
            raise LostProcessError(f"took more than {START_SECONDS:g} s to import the file") from None
        finally:
            self._log(self._process.output.take(), self.pid)
        if "error" in reply:
            raise ConfigError(reply["error"])
        if "threads" in reply:
            raise _ThreadsError(", ".join(reply["threads"]))
        if "lost" in reply:
            await asyncio.to_thread(self._process.kill)
            self._log(self._process.output.take(), self.pid, logging.WARNING)
            raise LostProcessError(self._process.exit_text)
        self._loaded = True

    def _begin_fork(self) -> ForkedProcess:
        """Send the request for one more process."""
        if not self.alive:
            raise LostProcessError("cannot be forked: the template is gone")
        try:
            channel, childs_channel = socket.socketpair()
            childs_lifeline, lifeline = os.pipe()
        except OSError as error:
            raise LostProcessError(f"cannot be forked: {error}") from error
        channel.setblocking(False)
        self._forked += 1
        process = self._forks[self._forked] = ForkedProcess(self._forked, channel, lifeline)
        request = json.dumps({"fork": process.number}).encode()
        try:
            socket.send_fds(self._channel, [request], [childs_channel.fileno(), childs_lifeline])
        except OSError as error:
            self._over(process.number, None, f"cannot be forked: {error}")
        finally:
            childs_channel.close()
            os.close(childs_lifeline)
        return process

    def _hear(self) -> None:
        while self.alive:
            try:
                packet, descriptors, _, _ = socket.recv_fds(self._channel, MAX_PACKET, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if packet:
                self._take(json.loads(packet), descriptors)
            else:
                self._end()

    def _take(self, message: dict[str, Any], descriptors: list[int]) -> None:
        if "forked" in message:
            self._forks[message["forked"]].was_forked(message["pid"], *descriptors)
        elif "unforked" in message:
            self._over(message["unforked"], None, message["error"])
        elif "exited" in message:
            self._over(message["exited"], message["code"])
        elif "printed" in message:
            self._log(message["text"], message["pid"])
        elif not self._reply.done():
            self._reply.set_result(message)

    def _over(self, number: int, code: int | None, failure: str | None = None) -> None:
        process = self._forks.pop(number)
        process.failure = failure
        process.has_ended(code)

    def _end(self) -> None:
        """The template is gone, or is no longer waited for: its forks go with it."""
        if not self.alive:
            return
        self._ended.set()
        self._loop.remove_reader(self._channel)
        self._loop.remove_reader(self._process.output.fd)
        for number in list(self._forks):
            self._forks[number].kill()
            self._over(number, None)
        if not self._reply.done():
            self._reply.set_result({"lost": True})

    def _print(self) -> None:
        self._process.output.read()
        if not self._process.output.open:
            self._loop.remove_reader(self._process.output.fd)

    def _log(self, text: str, pid: int, level: int = logging.INFO) -> None:
        if text:
            log.log(level, "%s, process %d, printed: %s", self._name, pid, text)
