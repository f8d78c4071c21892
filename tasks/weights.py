"""The new policy version to every engine."""

from __future__ import annotations

from typing import Any

from prefect import task

from rlhf_core.telemetry import Stopwatch
from tasks.options import TASK_OPTIONS
from tasks.run import current_run


@task(name="weight sync", task_run_name="weight sync {version}", **TASK_OPTIONS)
async def sync_weights(run_id: str, version: int) -> dict[str, Any]:
    """Bring every engine to ``version``; nothing to do where they are there already."""
    watch = Stopwatch()
    await current_run(run_id).session.heal(version, _nothing)
    return {"version": version, **watch.stamp()}


async def _nothing() -> None:
    """``heal`` has already done the work: it brings every actor to the version."""
