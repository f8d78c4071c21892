"""The new policy version to every engine."""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import task

from rlhf_core.records import Stage
from rlhf_core.storage import record_sync
from rlhf_core.telemetry import Stopwatch
from tasks.due import newest_version
from tasks.options import TASK_OPTIONS
from tasks.run import current_run
from tasks.stages import finished
from tasks.watch import at_stage


@task(name="weight sync", task_run_name="weight sync {version}", **TASK_OPTIONS)
@at_stage("weight sync")
async def sync_weights(run_id: str, version: int) -> dict[str, Any]:
    """Bring every engine to ``version``; nothing to do where they are there already, or where the log has a newer one.

    It waits until no request is in flight; with partial rollout it pauses them.
    """
    run = current_run(run_id)
    watch = Stopwatch()
    if await finished(run, version, Stage.UPDATE):
        # An old iteration, run again: whoever needs the engines brings them to what it needs.
        return {"version": version, "superseded_by": await asyncio.to_thread(newest_version, run)}
    await run.session.with_engines(version, version, _nothing)
    stamp = watch.stamp()
    await asyncio.to_thread(record_sync, run.store, version, stamp)
    return {"version": version, **stamp}


async def _nothing() -> None:
    """``with_engines`` has already done the work."""
