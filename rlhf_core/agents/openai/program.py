"""A program of the user's that runs for one episode: its own process group, bounded output, and nothing left behind.

::

    document ──stdin──▶ program ──stdout, stderr──▶ the last KEPT bytes of each
                           └── exit, the limit, a flood of output, or the end of this process ──▶ all it started is killed

Nothing here blocks the event loop: pipes and the exit are watched by it, the killed are waited for in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.errors import AgentDeadlineError, AgentError
from rlhf_core.processes.lifeline import kill_when_closed
from rlhf_core.processes.owned import EXIT_SECONDS, exit_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KEPT = 64 << 10  # bytes of each stream that are kept: the end of it
MAX_OUTPUT = 256 << 20  # bytes: a program that writes more does nothing else
PIECE = 64 << 10  # bytes of one read: what a pipe holds


@dataclass(frozen=True, slots=True)
class Ended:
    """A program that came to its own end."""

    code: int | None  # negative: the signal that ended it; None: it hangs in the kernel
    stdout: bytes  # the last KEPT bytes
    stderr: bytes

    @property
    def how(self) -> str:
        """For messages."""
        return exit_text(self.code)


async def run_program(
    command: Sequence[str], environment: Mapping[str, str], document: bytes, mark: str, seconds: float
) -> Ended:
    """Run a program to its end, at most so many seconds; then, or cancelled, kill it and all it started.

    Args:
        command: the program and its arguments.
        environment: all of it.
        document: what it reads from stdin.
        mark: a variable of ``environment`` whose value no other process has: by it those are found that left the group.
        seconds: the limit.

    Raises:
        AgentError: it cannot be started, or floods its output.
        AgentDeadlineError: the limit passed.
    """
    try:
        program = _Program(command, environment, document)
    except OSError as error:
        raise AgentError(f"{command[0]!r} cannot be started: {error}") from error
    try:
        async with asyncio.timeout(seconds):
            await program.over
    except TimeoutError as error:
        said = shown(program.stderr.kept)
        raise AgentDeadlineError(
            f"{command[0]!r} did not end within agent.episode_timeout={seconds:.3g} s{said}"
        ) from error
    finally:
        program.stop()
        await asyncio.to_thread(program.free, f"{mark}={environment[mark]}".encode())
    if program.flooded:
        raise AgentError(f"{command[0]!r} wrote more than {MAX_OUTPUT >> 20} MiB of output")
    return Ended(program.code, program.stdout.kept, program.stderr.kept)


def shown(stream: bytes, characters: int = 1000) -> str:
    """The end of a stream for messages, with a colon before it; nothing where it is empty."""
    text = stream.decode(errors="replace").strip()
    return f": {'…' if len(text) > characters else ''}{text[-characters:]}" if text else ""


class _Tail:
    """The end of what a pipe carried."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.kept = b""
        self.total = 0
        self.open = True

    def read(self) -> bool:
        """Take one piece; whether there was one."""
        try:
            piece = os.read(self.fd, PIECE)
        except BlockingIOError:
            return False
        self.open = bool(piece)
        self.kept = (self.kept + piece)[-KEPT:]
        self.total += len(piece)
        return bool(piece)


class _Program:
    """The running program, watched by the event loop that made it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], document: bytes) -> None:
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self._loop.create_future()
        self.flooded = False
        leash, self._leash = os.pipe()  # our end is never written: that it closes, with this process, is the message
        stdout, child_stdout = os.pipe()
        stderr, child_stderr = os.pipe()
        self.stdout, self.stderr = _Tail(stdout), _Tail(stderr)
        stdin = os.memfd_create("task")  # a pipe would have to be fed while the program reads
        try:
            os.write(stdin, document)
            os.lseek(stdin, 0, os.SEEK_SET)
            self._process = subprocess.Popen(
                list(command),
                stdin=stdin,
                stdout=child_stdout,
                stderr=child_stderr,
                env=dict(environment),
                pass_fds=(leash,),
                start_new_session=True,
            )
            kill_when_closed(leash, self._process.pid)
        except OSError:
            for fd in (self._leash, stdout, stderr):
                os.close(fd)
            raise
        finally:
            for fd in (leash, child_stdout, child_stderr, stdin):
                os.close(fd)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._pidfd, self._finish)
        for tail in (self.stdout, self.stderr):
            self._loop.add_reader(tail.fd, self._read, tail)

    @property
    def code(self) -> int | None:
        """The exit code; only after ``free``."""
        return self._process.returncode

    def stop(self) -> None:
        """Kill the group and read what it wrote until then; the event loop has nothing to do with it any more."""
        # Before the program is reaped: until then the id of its group cannot belong to others.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for fd in (self._pidfd, self.stdout.fd, self.stderr.fd):
            self._loop.remove_reader(fd)
        for tail in (self.stdout, self.stderr):
            while not self.flooded and tail.open and tail.read():
                self.flooded = tail.total > MAX_OUTPUT

    def free(self, mark: bytes) -> None:
        """Kill what left the group, wait for the program's exit, and close what belongs to it. Blocks."""
        _kill_marked(mark)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_SECONDS)
        for fd in (self._leash, self._pidfd, self.stdout.fd, self.stderr.fd):
            os.close(fd)

    def _read(self, tail: _Tail) -> None:
        if not tail.read() and not tail.open:
            self._loop.remove_reader(tail.fd)
        if tail.total > MAX_OUTPUT:
            self.flooded = True
            self._finish()

    def _finish(self) -> None:
        self._loop.remove_reader(self._pidfd)
        if not self.over.done():
            self.over.set_result(None)


def _kill_marked(mark: bytes) -> None:
    """Kill whoever has ``mark`` in its environment: what left the group inherited it all the same."""
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # others' processes, and such as ended meanwhile
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)
