"""A user's file with environments, in a pool; and what is left of processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.agents.environment.pool import EnvironmentPool
from rlhf_core.user_file import module_from_file

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


def load(argument: dict[str, Any]) -> Callable[[int], Any]:
    """The entry of the template: makes the file's ``Game``."""
    module = module_from_file(Path(argument["file"]), f"train.agent_func_path={argument['file']!r}")
    return lambda seed: module.Game()


def write_game(folder: Path, code: str, name: str = "game.py") -> str:
    """A user's file; its path."""
    path = folder / name
    path.write_text(textwrap.dedent(code))
    return str(path)


@contextlib.asynccontextmanager
async def pool_of(file: str, *, max_processes: int = 4, step_timeout: float = 20) -> AsyncIterator[EnvironmentPool]:
    """A pool of the file's games."""
    pool = EnvironmentPool(
        "environment_rig:load", {"file": file}, max_processes=max_processes, step_timeout=step_timeout, name="game.py"
    )
    try:
        yield pool
    finally:
        await pool.close()


def is_gone(pid: int) -> bool:
    """True if no such process exists; a zombie still does."""
    return not Path(f"/proc/{pid}").exists()


async def gone(*pids: int, seconds: float = 10) -> bool:
    """True once all of them are."""
    return await until(lambda: all(map(is_gone, pids)), seconds)


async def until(holds: Callable[[], bool], seconds: float = 10) -> bool:
    """Wait for a condition; whether it came to hold."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(0.02)
    return True


def children_of(pid: int) -> list[int]:
    """Its children, zombies too."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def resident_mib(pid: int) -> float:
    """Memory of a process, MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def descriptors() -> list[str]:
    """What this process holds open, without numbers that differ from one socket to the next."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder itself
            found.append(str(entry.readlink()).split("[")[0].split(":")[0])
    return sorted(found)
