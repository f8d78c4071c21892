"""What runs in and below this process. Linux only, as are lifelines."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_JOINED_SECONDS = 0.5  # in which a thread that was joined is gone from the kernel too


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends: so it can be found, and killed."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Let the kernel kill this process, not its children, when the thread that forked it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def child_pids() -> set[int]:
    """The children of this process's main thread, zombies too; none where the kernel does not list them."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    return {int(pid) for pid in listed.read_text().split()} if listed.exists() else set()


def other_threads() -> list[str]:
    """Names of the threads of this process besides the calling one."""
    tasks = Path("/proc/self/task")
    deadline = time.monotonic() + _JOINED_SECONDS
    while len(os.listdir(tasks)) > threading.active_count() and time.monotonic() < deadline:  # noqa: PTH208 - names only
        time.sleep(0.01)
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found = []
    for task in sorted(int(name) for name in os.listdir(tasks)):  # noqa: PTH208
        if task != threading.get_native_id():
            found.append(names.get(task) or _kernel_name(tasks / str(task)))
    return found


def _kernel_name(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except OSError:
        return "a thread that just ended"
