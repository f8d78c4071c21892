"""What every stage task does around its work: believe the manifest if there is one, write it last if there is none."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf_core.errors import StorageError
from rlhf_core.records import Part, Stage, StageManifest, StageRef
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from tasks.run import AnyRun

logger = get_logger(__name__)

Result = TypeVar("Result")


async def finished(run: AnyRun, iteration: int, stage: Stage) -> tuple[StageManifest, StageRef] | None:
    """The stage's manifest, if it is done."""
    return await asyncio.to_thread(run.store.stage, iteration, stage)


async def required(run: AnyRun, iteration: int, stage: Stage) -> tuple[StageManifest, StageRef]:
    """The manifest of a stage that must be done.

    Raises:
        StorageError: it is not.
    """
    found = await finished(run, iteration, stage)
    if found is None:
        raise StorageError(f"{run.store.url}: stage {stage} of iteration {iteration} has no manifest; run it first")
    return found


async def commit(
    run: AnyRun,
    iteration: int,
    stage: Stage,
    parts: Sequence[Part],
    inputs: Sequence[StageRef],
    body: dict[str, Any],
) -> StageRef:
    """Write the manifest: the stage is done.

    Raises:
        LeaseError: this process is not the run's writer any more.
    """
    run.session.check_lease()
    manifest = StageManifest(
        run_id=run.run_id,
        iteration=iteration,
        stage=stage,
        parts=tuple(parts),
        rows=sum(part.rows for part in parts),
        tokens=sum(part.tokens for part in parts),
        policy_version=iteration,
        inputs={ref.stage: ref.sha256 for ref in inputs},
        body={**body, "user_code": run.user_code} if run.user_code else body,
    )
    return await to_the_end(asyncio.to_thread(run.store.commit, manifest))


async def to_the_end(work: Coroutine[Any, Any, Result]) -> Result:
    """Do it; who is cancelled meanwhile, as by another iteration that fails, waits for its end all the same.

    What is written then is there before the run is given back to the next attempt. Cancelled twice, it waits no longer.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("while the run was ending: %s", error)
        raise


def small(ref: StageRef) -> dict[str, Any]:
    """A reference as a task's result: small JSON."""
    return {
        "stage": str(ref.stage),
        "iteration": ref.iteration,
        "manifest": ref.path,
        "sha256": ref.sha256,
        "rows": ref.rows,
    }
