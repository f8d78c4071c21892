"""One worker process, from the controller's side: start, call with a hard limit, kill with all its children.

Synchronous: each worker belongs to one thread. Only ``alive`` and ``signal_group`` may be used by others.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NoReturn

from rlhf_core.errors import ConfigError
from rlhf_core.processes.owned import OwnedProcess
from rlhf_core.processes.wire import CHUNK, FrameReader, encode
from rlhf_core.rewards.answers import Row
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.rewards.contract import FunctionSpec

log = get_logger(__name__)

EXIT_GRACE = 0.5  # a process that closed its channel normally is just ending: its exit code says more


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
        self._process = OwnedProcess("rlhf_core.rewards.worker")

    @property
    def pid(self) -> int:
        """Process id, and id of the process group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._process.alive

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
        self._process.signal_group()

    def kill(self) -> None:
        """End the process and all it started, and free what belongs to it. A second call does nothing."""
        if self._process.kill():
            self._log_output()

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
        channel = self._process.channel
        channel.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            channel.sendall(message)
        except TimeoutError:
            raise _NoAnswerError from None

    def _receive(self, deadline: float) -> dict[str, Any]:
        channel, pidfd, output = self._process.channel, self._process.pidfd, self._process.output
        reader = FrameReader()
        while (remaining := deadline - time.monotonic()) > 0:
            watched: list[Any] = [channel, pidfd, *([output.fd] if output.open else [])]
            ready = wait(watched, remaining)
            if output.fd in ready:
                output.read()
            if channel in ready:
                piece = channel.recv(CHUNK)
                reply = reader.feed(piece) if piece else self._raise_lost()
                if reply is not None:
                    return dict(reply)
            elif pidfd in ready:
                self._raise_lost()
        raise _NoAnswerError

    def _raise_lost(self) -> NoReturn:
        ended = wait([self._process.pidfd], EXIT_GRACE)
        self.kill()
        text = self._process.exit_text if ended else "closed the channel of the messages"
        raise LostWorkerError(f"its process {text}")

    def _log_output(self) -> None:
        if text := self._process.output.take():
            log.info("reward worker %d printed: %s", self.pid, text)
