"""SIGKILL of a run's processes, as the log says how far it is."""

import asyncio
import contextlib

import psutil


def titled(name):
    """The processes of this session whose title begins with ``name``; one that ends meanwhile has none."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if " ".join(process.cmdline()).startswith(name):
                found.append(process)
    return found


def kill(name):
    """End the processes of this session whose title begins with ``name``, at once."""
    found = titled(name)
    assert found, f"no process {name!r} to kill"
    for process in found:
        process.kill()


async def kill_as_recorded(store, script):
    """``script``: (iteration, stage, name), in order: as soon as that stage is in the log, ``kill(name)``."""
    for iteration, stage, name in script:
        while store.stage(iteration, stage) is None:
            await asyncio.sleep(0.02)
        kill(name)


async def disturbed(run, store, script):
    """Await a run while that happens; its result. All of them must have been killed by its end."""
    running, killing = asyncio.create_task(run), asyncio.create_task(kill_as_recorded(store, script))
    result = await running
    assert killing.done(), "the run ended before everybody was killed"
    await killing
    return result
