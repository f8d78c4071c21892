"""One process of an episode, from the controller's side: one message, one answer, and its end.

It belongs to one event loop, and never blocks it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from typing import TYPE_CHECKING, Any

from rlhf_core.processes.owned import exit_text
from rlhf_core.processes.serving import WHERE_SIGNAL
from rlhf_core.processes.values import decode_values, encode_values
from rlhf_core.processes.wire import CHUNK, FrameReader

if TYPE_CHECKING:
    from collections.abc import Iterator

EXIT_GRACE = 2.0  # a process that closed its channel normally is just ending: its exit code says more
WHERE_SECONDS = 0.1  # in which a process that hangs can print where


class LostProcessError(Exception):
    """The process is gone; the message says how, and continues "its process ..."."""


class ForkedProcess:
    """One process below a template. ``ended`` is done once it and all it started are gone."""

    def __init__(self, number: int, channel: socket.socket, lifeline: int) -> None:
        loop = asyncio.get_running_loop()
        self.number = number
        self.pid = 0
        self.forked: asyncio.Future[None] = loop.create_future()
        self.failure: str | None = None  # why it could not be forked
        self.ended: asyncio.Future[int | None] = loop.create_future()  # the exit code; None: nobody can know it
        self._channel = channel
        self._lifeline = lifeline
        self._pidfd: int | None = None
        self._killed = False
        self._requests = 0  # that wait for an answer

    @property
    def alive(self) -> bool:
        """False once it was killed or has ended."""
        return not self._killed and not self.ended.done()

    async def request(self, message: dict[str, Any]) -> dict[str, Any]:
        """One message and its answer; no limit.

        Raises:
            LostProcessError: it ended, or does not speak any more.
            TypeError, ValueError: the message is neither JSON nor bytes.
        """
        data = encode_values(message)
        with self._holding_channel():
            try:
                await asyncio.get_running_loop().sock_sendall(self._channel, data)
            except OSError:
                raise await self._lost() from None
            return await self.receive()

    async def receive(self) -> dict[str, Any]:
        """The next message.

        Raises:
            LostProcessError: see ``request``.
        """
        loop, reader = asyncio.get_running_loop(), FrameReader(decode_values)
        with self._holding_channel():
            try:
                while piece := await loop.sock_recv(self._channel, CHUNK):
                    if (message := reader.feed(piece)) is not None:
                        return dict(message)
            except OSError:
                pass
            except (ValueError, TypeError, RecursionError) as error:
                self.kill()
                raise LostProcessError(f"wrote into the channel of the messages: {error}") from None
            raise await self._lost()

    async def kill_hung(self) -> None:
        """Let it print where it hangs, into the log, and kill it."""
        self._signal(WHERE_SIGNAL)
        try:
            await asyncio.sleep(WHERE_SECONDS)
        finally:
            self.kill()

    def kill(self) -> None:
        """End it, without waiting. A second call does nothing."""
        if self._killed:
            return
        self._killed = True
        self._signal(signal.SIGKILL)
        os.close(self._lifeline)  # the kernel kills the group, also where the template is gone
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)  # who waits for an answer reads what is there, and then the end

    def was_forked(self, pid: int, pidfd: int) -> None:
        """The template has forked it."""
        self.pid, self._pidfd = pid, pidfd
        if self._killed:
            self._signal(signal.SIGKILL)
        if not self.forked.done():
            self.forked.set_result(None)

    def has_ended(self, code: int | None) -> None:
        """The template has reaped it, or cannot fork it, or is gone."""
        if self.ended.done():
            return
        self.ended.set_result(code)
        if not self.forked.done():
            self.forked.set_result(None)
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        self.kill()
        self._free_channel()

    @contextlib.contextmanager
    def _holding_channel(self) -> Iterator[None]:
        """The channel must not be closed under the event loop that waits for it."""
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1
            self._free_channel()

    def _free_channel(self) -> None:
        if self.ended.done() and not self._requests:
            self._channel.close()

    async def _lost(self) -> LostProcessError:
        await asyncio.wait([self.ended], timeout=EXIT_GRACE)
        self.kill()
        if not self.ended.done():
            return LostProcessError("closed the channel of the messages")
        code = self.ended.result()
        return LostProcessError("ended with its template" if code is None else exit_text(code))

    def _signal(self, number: signal.Signals) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._pidfd, number)
