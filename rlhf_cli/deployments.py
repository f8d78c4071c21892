"""Everything that `rlhf up` brings to the Prefect server, in one process: ``python -m rlhf_cli.deployments``.

::

    deployments of deployments/prefect.yaml ─▶ schedules as they were before ─▶ automations
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from rlhf_cli.automations import read_automations, set_up_automations
from rlhf_cli.schedules import turn_on_again, turned_on

PREFECT_FILE = Path("deployments/prefect.yaml")


async def set_up() -> int:
    """Returns the exit code of Prefect's own command."""
    before = await turned_on()
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(PREFECT_FILE)]
    done = await asyncio.to_thread(subprocess.run, command, check=False)
    await turn_on_again(before)
    if done.returncode == 0:
        await set_up_automations(read_automations())
    return done.returncode


if __name__ == "__main__":
    sys.exit(asyncio.run(set_up()))
