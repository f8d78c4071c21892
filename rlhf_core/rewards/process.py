"""One worker process, from the controller's side: start, call with a hard limit, kill with all its children.

Synchronous: each worker belongs to one thread. Only ``alive`` and ``signal_group`` may be used by others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NoReturn

from rlhf_core.errors import ConfigError
from rlhf_core.rewards.answers import Row
from rlhf_core.rewards.wire import CHUNK, FrameReader, encode
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.rewards.contract import FunctionSpec

log = get_logger(__name__)

MAX_OUTPUT = 2000  # bytes a call may print into the log; the rest is counted only
EXIT_GRACE = 0.5  # a process that closed its channel normally is just ending: its exit code says more
EXIT_SECONDS = 10.0  # a killed process that is not gone by then hangs in the kernel and is left to it


class CallKind(StrEnum):
    """What became of one call."""

    ANSWERED = "answered"  # there are rows, some of them possibly errors
    RAISED = "raised"  # the function raised, or the call could not be sent
    TIMED_OUT = "timed_out"  # no answer within the limit: the worker was killed
    DIED = "died"  # the worker's process ended before it answered


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The result of one call."""

    kind: CallKind
    rows: list[Row] = field(default_factory=list)  # one per sample of the call, only if ANSWERED
    error: str | None = None
    seconds: float = 0.0


class LostWorkerError(Exception):
    """The process is gone, or was killed because it did not answer; the message says which."""


class _NoAnswerError(Exception):
    """The limit passed."""


class WorkerProcess:
    """A process that runs reward functions. It is dead after any call that timed out or killed it."""

    def __init__(self) -> None:
        self._channel, channel = socket.socketpair()
        lifeline, self._lifeline = os.pipe()  # our end is never written: that it closes is the message
        self._output, output = os.pipe()
        os.set_blocking(self._output, False)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlhf_core.rewards.worker", str(channel.fileno()), str(lifeline)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(channel.fileno(), lifeline),
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path)},
        )
        self._pidfd = os.pidfd_open(self._process.pid)
        channel.close()
        os.close(lifeline)
        os.close(output)
        self._lock = threading.Lock()  # guards _reaped: after it the pid may belong to another process
        self._reaped = False
        self._printed = b""
        self._printed_bytes = 0
        self._output_open = True

    @property
    def pid(self) -> int:
        """Process id, and id of the process group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        with self._lock:
            return not self._reaped and not wait([self._pidfd], 0)

    def load(self, specs: Sequence[FunctionSpec], timeout: float) -> list[bool]:
        """Load the functions; per function, whether it is group-wise.

        ``ConfigError`` with every function's problem, or ``LostWorkerError``; the process is dead after either.
        """
        names = ", ".join(spec.place for spec in specs)
        try:
            reply = self._exchange(encode({"functions": [asdict(spec) for spec in specs]}), timeout)
        except _NoAnswerError:
            self.kill()
            raise LostWorkerError(f"{names}: loading took more than {timeout:g} s") from None
        except LostWorkerError as error:
            raise LostWorkerError(f"{names}: while loading, {error}") from None
        if "error" in reply:
            self.kill()
            raise ConfigError(reply["error"])
        return list(reply["group_wise"])

    def call(self, message: bytes, timeout: float) -> CallOutcome:
        """Run one call; it may take ``timeout`` seconds from now."""
        started = time.monotonic()

        def outcome(kind: CallKind, rows: Sequence[Row] = (), error: str | None = None) -> CallOutcome:
            return CallOutcome(kind, list(rows), error, time.monotonic() - started)

        try:
            reply = self._exchange(message, timeout)
        except _NoAnswerError:
            self.kill()
            return outcome(CallKind.TIMED_OUT, error=f"no answer within reward.timeout={timeout:g} s")
        except LostWorkerError as error:
            return outcome(CallKind.DIED, error=str(error))
        if "raised" in reply:
            return outcome(CallKind.RAISED, error=f"the reward function raised {reply['raised']}")
        return outcome(CallKind.ANSWERED, [Row(*row) for row in reply["rows"]])

    def signal_group(self) -> None:
        """SIGKILL to the process and all it started, without waiting."""
        with self._lock:
            if not self._reaped:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End the process and all it started, and free what belongs to it. A second call does nothing."""
        self.signal_group()  # before the process is reaped: while it is a zombie, its group id cannot be reused
        with self._lock:
            if self._reaped:
                return
            self._reaped = True
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(EXIT_SECONDS)
            os.close(self._pidfd)
        self._read_output()
        self._log_output()
        self._channel.close()
        os.close(self._lifeline)
        os.close(self._output)

    def _exchange(self, message: bytes, timeout: float) -> dict[str, Any]:
        """Send, then wait for the answer while what the process prints is drained."""
        deadline = time.monotonic() + timeout
        try:
            self._send(message, deadline)
            return self._receive(deadline)
        except (BrokenPipeError, ConnectionResetError):
            self._raise_lost()
        except ValueError as error:
            self.kill()
            raise LostWorkerError(f"its process wrote into the channel of the messages: {error}") from None
        finally:
            self._log_output()

    def _send(self, message: bytes, deadline: float) -> None:
        self._channel.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            self._channel.sendall(message)
        except TimeoutError:
            raise _NoAnswerError from None

    def _receive(self, deadline: float) -> dict[str, Any]:
        reader = FrameReader()
        while (remaining := deadline - time.monotonic()) > 0:
            watched: list[Any] = [self._channel, self._pidfd, *([self._output] if self._output_open else [])]
            ready = wait(watched, remaining)
            if self._output in ready:
                self._read_output()
            if self._channel in ready:
                piece = self._channel.recv(CHUNK)
                reply = reader.feed(piece) if piece else self._raise_lost()
                if reply is not None:
                    return dict(reply)
            elif self._pidfd in ready:
                self._raise_lost()
        raise _NoAnswerError

    def _raise_lost(self) -> NoReturn:
        ended = wait([self._pidfd], EXIT_GRACE)
        self.kill()
        text = _exit_text(self._process.returncode) if ended else "closed the channel of the messages"
        raise LostWorkerError(f"its process {text}")

    def _read_output(self) -> None:
        try:
            while piece := os.read(self._output, CHUNK):
                self._printed_bytes += len(piece)
                self._printed += piece[: MAX_OUTPUT - len(self._printed)]
            self._output_open = False
        except BlockingIOError:
            return

    def _log_output(self) -> None:
        if self._printed:
            text = self._printed.decode(errors="replace").rstrip()
            more = self._printed_bytes - len(self._printed)
            log.info("reward worker %d printed: %s%s", self.pid, text, f" … {more} more bytes" if more else "")
        self._printed, self._printed_bytes = b"", 0


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"
