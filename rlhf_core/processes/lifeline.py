"""The promise that a process dies with its controller, kept by the kernel."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys


def hold_lifeline(fd: int) -> None:
    """Let this process group end with the controller, which holds the other end of the pipe."""
    os.set_inheritable(fd, False)
    kill_when_closed(fd, os.getpgrp())
    if select.select([fd], [], [], 0)[0]:
        sys.exit("the controller was gone before this process began")


def kill_when_closed(fd: int, group: int) -> None:
    """Let the kernel kill a process group when the other end of the pipe closes: whoever held it is gone.

    No thread could do that: a runaway regular expression or C extension holds the interpreter's lock for ever. The order
    lasts as long as any process has ``fd`` open; that one of the group may never look at it does not matter.
    """
    fcntl.fcntl(fd, fcntl.F_SETOWN, -group)
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | fcntl.FASYNC)


def let_go(fd: int) -> None:
    """Take the order back: from now on this process looks after its end itself."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~fcntl.FASYNC)
