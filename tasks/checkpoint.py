"""A snapshot of the training state, and what it makes superfluous.

::

    save ─▶ checkpoint.json ─▶ latest.json ─▶ best.json ─▶ rotation
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from prefect import task

from rlhf_core.records import Stage
from rlhf_core.storage import CheckpointStore, Keep, rotate
from rlhf_core.telemetry import Stopwatch
from tasks.advantage import kl_coef_of
from tasks.best import best_of
from tasks.options import TASK_OPTIONS
from tasks.rollout import cursor_before
from tasks.run import current_run
from tasks.stages import required, to_the_end
from tasks.watch import at_stage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rlhf_core.storage import Best, FileEntry
    from tasks.run import AnyRun


@task(name="checkpoint", task_run_name="checkpoint {version}", **TASK_OPTIONS)
@at_stage("checkpoint")
async def checkpoint(run_id: str, version: int) -> dict[str, Any]:
    """Save policy version ``version``: visible only whole; nothing to do where it, or a later one, is saved already.

    Then what ``ckpt.max_num`` and ``ckpt.max_mem`` leave no room for is deleted.
    """
    run = current_run(run_id)

    async def position() -> dict[str, Any]:
        return {"cursor": asdict(await cursor_before(run, version)), "kl_coef": await kl_coef_of(run, version)}

    return await saved_version(run, version, run.config.actor.world_size, position)


async def saved_version(
    run: AnyRun, version: int, world_size: int, position: Callable[[], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    """The checkpoint of a version, made where there is none, and all that follows from it.

    Args:
        run: of whatever kind.
        version: of its model.
        world_size: ranks of its model.
        position: what only this kind of run keeps of where it stands.
    """
    best = await asyncio.to_thread(best_of, run, version)
    newest = await asyncio.to_thread(CheckpointStore(run.store).newest)
    if newest is not None and newest[0] > version:  # an old iteration, run again: this one may be rotated away
        return {"version": version, "superseded_by": newest[0]}
    saved: dict[str, Any] = {"already": True}
    if newest is None or newest[0] < version:
        saved = await _save(run, version, world_size, best, position)
    run.session.check_lease()
    deleted = await to_the_end(asyncio.to_thread(_settle, run, version, best))
    return {"version": version, **saved, "best": None if best is None else asdict(best), "deleted": deleted}


async def _save(
    run: AnyRun, version: int, world_size: int, best: Best | None, position: Callable[[], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    watch = Stopwatch()

    async def saved() -> tuple[list[FileEntry], dict[str, str]]:
        return await run.session.save(version), await run.session.digests()

    files, digests = await run.session.heal(version, saved)
    manifest, _ = await required(run, version - 1, Stage.UPDATE)
    body = {
        "version": version,
        "iteration": version,  # the next one to run
        **digests,
        "optimizer_steps": manifest.body["optimizer_steps"],
        **await position(),
        "best": None if best is None else asdict(best),
        "world_size": world_size,
        "zero_stage": run.config.ds.zero_stage,
        "universal": run.config.ds.use_universal_ckpt,
        **watch.stamp(),
    }
    run.session.check_lease()
    await to_the_end(asyncio.to_thread(CheckpointStore(run.store).commit, version, body, files))
    return {"files": len(files), "bytes": sum(entry.bytes for entry in files), **watch.stamp()}


def _settle(run: AnyRun, version: int, best: Best | None) -> list[int]:
    """The pointers, then the rotation. Returns the versions that were deleted."""
    ckpt = run.config.ckpt
    run.store.set_pointer("latest", {"version": version})
    if best is not None:
        run.store.set_pointer("best", asdict(best))
    keep = Keep(ckpt.max_num, None if ckpt.max_mem is None else ckpt.max_mem * 2**30)
    return rotate(CheckpointStore(run.store), keep, None if best is None else best.version)
