"""A Python module in a process of its own, from the side that started it.

::

    controller ══channel══ process      messages, with a meaning of the module's own
               ──lifeline─▶             never written: that it closes is the message (lifeline.py)
               ◀──output──              stdout and stderr, which belong to code of the user's
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from rlhf_core.processes.printed import PrintedOutput

if TYPE_CHECKING:
    from collections.abc import Mapping

_SIGNALS = {number.value: number.name for number in signal.Signals}  # real-time signals have no names
EXIT_SECONDS = 10.0  # a killed process that is not gone by then hangs in the kernel and is left to it


class OwnedProcess:
    """``python -m MODULE CHANNEL LIFELINE``, with a session of its own: one signal ends it with whatever it started.

    ``alive`` and ``signal_group`` may be used by any thread.
    """

    def __init__(
        self,
        module: str,
        *,
        kind: socket.SocketKind = socket.SOCK_STREAM,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.channel, channel = socket.socketpair(socket.AF_UNIX, kind)
        lifeline, self._lifeline = os.pipe()
        read_end, output = os.pipe()
        self.output = PrintedOutput(read_end)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(channel.fileno()), str(lifeline)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(channel.fileno(), lifeline),
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path),
                    **(environment or {}),
                },
            )
        except OSError:
            self._close_descriptors()
            raise
        finally:
            channel.close()
            os.close(lifeline)
            os.close(output)
        self.pidfd = os.pidfd_open(self._process.pid)  # readable once the process has ended
        self._lock = threading.Lock()  # guards _reaped: after it the pid may belong to another process
        self._reaped = False

    @property
    def pid(self) -> int:
        """Process id, and id of the process group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        with self._lock:
            return not self._reaped and not wait([self.pidfd], 0)

    @property
    def exit_text(self) -> str:
        """How the process ended; only after ``kill``."""
        return exit_text(self._process.returncode)

    def signal_group(self) -> None:
        """SIGKILL to the process and all it started, without waiting."""
        with self._lock:
            if not self._reaped:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> bool:
        """End the process and all it started, and free what belongs to it. A second call does nothing: False.

        What it printed at last is left in ``output``.
        """
        self.signal_group()  # before the process is reaped: while it is a zombie, its group id cannot be reused
        with self._lock:
            if self._reaped:
                return False
            self._reaped = True
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(EXIT_SECONDS)
            os.close(self.pidfd)
        self.output.read()
        self._close_descriptors()
        return True

    def _close_descriptors(self) -> None:
        self.channel.close()
        os.close(self._lifeline)
        self.output.close()


def exit_text(code: int | None) -> str:
    """How a process ended, for messages.

    Args:
        code: its exit code, negative for a signal; None: it has not ended.
    """
    if code is None:
        return "was killed, and still hangs in the kernel"
    if code >= 0:
        return f"exited with code {code}"
    name = _SIGNALS.get(-code, f"signal {-code}")
    return f"was killed by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"
