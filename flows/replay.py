"""The saved trajectories of a run, trained on again; nothing is generated.

::

    what-if     source ─▶ its configuration, changed ─▶ a run of its own: reward ─▶ advantage ─▶ update ─▶ … of every iteration
    reproduce   source ─▶ its state at iteration I ─▶ advantage ─▶ update ─▶ compare ─▶ … J, in a scratch run

A what-if is kept, resumed and retried like any run. A reproduction leaves nothing behind but its result.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

from prefect import flow, runtime
from prefect.logging import get_run_logger

from flows.identity import named_as_its_run
from flows.train import run_to_its_end
from rlhf_core.cluster.replay import find_source, storage_for
from rlhf_core.config.iteration_range import parse_iterations
from rlhf_core.config.replay import replay_config
from rlhf_core.errors import ConfigError, TrainingError
from rlhf_core.storage.find_run import find_run
from tasks.advantage import advantage
from tasks.reproduce import Scratch, compare, discard, make_scratch, not_reached, report_reproduction
from tasks.resume import Resume  # noqa: TC001  Prefect reads the annotations
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.run import default_run_id, opened
from tasks.update import update

if TYPE_CHECKING:
    from rlhf_core.storage import RunStore


@flow(name="rlhf", flow_run_name=named_as_its_run, persist_result=False)
async def replay(
    source: str,
    mode: Literal["what-if", "reproduce"] = "what-if",
    changes: list[str] | None = None,
    iterations: str | None = None,
    run_id: str | None = None,
    resume: Resume = "if-present",
    root: str | None = None,
    storage_options: dict[str, Any] | None = None,
    score: bool = False,
    scratch_root: str | None = None,
    keep: bool = False,
) -> dict[str, Any]:
    """Train on a run's saved trajectories again.

    Args:
        source: Id of the run below root, or its URL.
        mode: what-if - as a run of its own, with changes; reproduce - iterations as they were, and compare every digest.
        changes: What if: section.key=value, such as algo.advantage.estimator=rloo.
        iterations: First..last of the source's; a what-if takes all by default, a reproduction needs them.
        run_id: Of the what-if, a new one by default, the same id again resumes; or of the scratch run of a reproduction.
        resume: Of the what-if. must - the run has to exist; never - it must not; if-present - either.
        root: storage.root of the source, if it is an id.
        storage_options: Of that file system, such as the endpoint of an S3 server.
        score: Reproduce the rewards too, by scoring the answers again.
        scratch_root: Where the scratch run lies while it is needed; default: beside the source.
        keep: Do not remove the scratch run.
    """
    store = await asyncio.to_thread(find_run, source, root, storage_options)
    run_id = run_id or default_run_id(f"{store.run_id}-{mode}", str(runtime.flow_run.id))
    if mode == "what-if":
        return await _what_if(store, changes or [], iterations, run_id, resume)
    if iterations is None or changes:
        raise ConfigError("mode=reproduce does iterations again as they were: give iterations, and no changes")
    return await _reproduce(store, iterations, run_id, scratch_root, score=score, keep=keep)


async def _what_if(
    source: RunStore, changes: list[str], iterations: str | None, run_id: str, resume: Resume
) -> dict[str, Any]:
    body, _ = await asyncio.to_thread(find_source, source)
    span = None if iterations is None else parse_iterations(iterations)
    config = replay_config(body, source.url, storage_for(source), changes, span)
    get_run_logger().info("run %s, on the trajectories of %s", run_id, source.url)
    return await run_to_its_end(config, run_id, resume, source=source.url)


async def _reproduce(
    source: RunStore, iterations: str, run_id: str, scratch_root: str | None, *, score: bool, keep: bool
) -> dict[str, Any]:
    get_run_logger().info("iterations %s of %s, in the scratch run %s", iterations, source.url, run_id)
    scratch = await asyncio.to_thread(
        make_scratch, source, run_id, parse_iterations(iterations), scratch_root, score=score
    )
    try:
        redone = await _redo(scratch)
    finally:
        if not keep:
            await asyncio.to_thread(discard, scratch)
    return {**await report_reproduction(source, redone), "scratch": scratch.store.url if keep else None}


async def _redo(scratch: Scratch) -> list[dict[str, Any]]:
    """Every iteration, done again and compared."""
    run_id = scratch.run_id
    redone: list[dict[str, Any]] = []
    async with opened(scratch.config, run_id, "must"):
        for iteration in scratch.iterations:
            try:
                await rollout(run_id, iteration)
                await reward(run_id, iteration)
                await advantage(run_id, iteration)
                await update(run_id, iteration)
            except TrainingError as error:  # what came before, done again, is not what the log says
                return [*redone, *not_reached(scratch.iterations[len(redone) :], str(error))]
            redone.append(await compare(run_id, iteration))
    return redone
