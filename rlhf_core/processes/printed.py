"""What code of the user's prints: drained, so that it never blocks, and kept only as far as a log can bear it."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys

MAX_OUTPUT = 2000  # bytes of one spell that are kept; the rest is counted only
PIECE = 1 << 16
PIECES_AT_ONCE = 16  # a process that never stops printing must not keep its reader from other work


class PrintedOutput:
    """The reading end of a pipe that is some process's stdout and stderr."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.open = True  # False once nobody can write any more
        self._kept = b""
        self._seen = 0

    def read(self) -> None:
        """Take what is there, without waiting."""
        try:
            for _ in range(PIECES_AT_ONCE):
                piece = os.read(self.fd, PIECE)
                if not piece:
                    self.open = False
                    return
                self._seen += len(piece)
                self._kept += piece[: MAX_OUTPUT - len(self._kept)]
        except BlockingIOError:
            return

    @property
    def pending(self) -> bool:
        """Whether ``take`` would give something."""
        return self._seen > 0

    def take(self) -> str:
        """What was printed since the last call, cut; empty if nothing was."""
        text = self._kept.decode(errors="replace").rstrip()
        more = self._seen - len(self._kept)
        self._kept, self._seen = b"", 0
        return f"{text} … {more} more bytes" if more else text

    def close(self) -> None:
        """Free the descriptor."""
        os.close(self.fd)


def print_safely() -> None:
    """Set up stdout and stderr of a process that runs code of the user's.

    What was printed before a crash must not be lost, and printing odd text must not be an error.
    """
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]


def flush() -> None:
    """Let out what is printed so far, half lines too; code of the user's may have replaced or closed a stream."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
