"""Everything that `rlhf up` brings to the Prefect server, in one process: ``python -m rlhf_cli.deployments``.

::

    work pool, limit of its queue ─▶ deployments of deployments/prefect.yaml ─▶ schedules as they were before
                                                                             ─▶ automations ─▶ notifications
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from typing import get_args

from rlhf_cli.automations import read_automations, set_up_automations
from rlhf_cli.notifications import set_up_notifications
from rlhf_cli.schedules import turn_on_again, turned_on
from rlhf_cli.work_pools import PREFECT_FILE, PoolType, set_up_pool
from rlhf_core.errors import ConfigError


async def set_up(kind: PoolType | None, concurrent_runs: int | None) -> int:
    """Returns the exit code of Prefect's own command. Arguments and errors as ``set_up_pool``, ``set_up_notifications``."""
    await set_up_pool(kind, concurrent_runs)
    before = await turned_on()
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(PREFECT_FILE)]
    done = await asyncio.to_thread(subprocess.run, command, check=False)
    await turn_on_again(before)
    if done.returncode == 0:
        await set_up_automations(read_automations())
        await set_up_notifications()
    return done.returncode


def main() -> None:
    """For servers of your own; ``rlhf up`` for the local stack."""
    parser = argparse.ArgumentParser(
        prog="python -m rlhf_cli.deployments", description="Bring the deployments to Prefect."
    )
    parser.add_argument(
        "--pool", choices=get_args(PoolType), help="type of the work pool; default: as it is, or process"
    )
    parser.add_argument(
        "--concurrent-runs", type=_count, metavar="N", help="runs at a time; default: as before, first 1"
    )
    arguments = parser.parse_args()
    try:
        sys.exit(asyncio.run(set_up(arguments.pool, arguments.concurrent_runs)))
    except ConfigError as error:
        sys.exit(f"{type(error).__name__}: {error}")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of runs: give 1 or more")
    return int(text)


if __name__ == "__main__":
    main()
