"""A snapshot of the training state."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from prefect import task

from rlhf_core.records import Stage
from rlhf_core.storage import CheckpointStore
from rlhf_core.telemetry import Stopwatch
from tasks.advantage import kl_coef_of
from tasks.options import TASK_OPTIONS
from tasks.rollout import cursor_before
from tasks.run import current_run
from tasks.stages import required


@task(name="checkpoint", task_run_name="checkpoint {version}", **TASK_OPTIONS)
async def checkpoint(run_id: str, version: int) -> dict[str, Any]:
    """Save policy version ``version``: visible only whole; nothing to do where it is saved already."""
    run = current_run(run_id)
    checkpoints = CheckpointStore(run.store)
    if (newest := await asyncio.to_thread(checkpoints.newest, version)) is not None and newest[0] == version:
        await asyncio.to_thread(run.store.set_pointer, "latest", {"version": version})
        return {"version": version, "already": True}
    watch = Stopwatch()
    files = await run.session.heal(version, lambda: run.session.save(version))
    manifest, _ = await required(run, version - 1, Stage.UPDATE)
    digest = await run.session.digest()
    body = {
        "version": version,
        "iteration": version,  # the next one to run
        "digest": digest,
        "optimizer_steps": manifest.body["optimizer_steps"],
        "cursor": asdict(await cursor_before(run, version)),
        "kl_coef": await kl_coef_of(run, version),
        "world_size": run.config.actor.world_size,
        "zero_stage": run.config.ds.zero_stage,
        **watch.stamp(),
    }
    run.session.check_lease()
    await asyncio.to_thread(checkpoints.commit, version, body, files)
    await asyncio.to_thread(run.store.set_pointer, "latest", {"version": version})
    return {"version": version, "files": len(files), "bytes": sum(entry.bytes for entry in files), **watch.stamp()}
