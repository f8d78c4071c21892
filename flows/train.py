"""A run.

::

    configuration ─▶ open: log, lease, processes ─▶ (evaluate v0) ─▶ iteration 0 ─▶ iteration 1 ─▶ … ─▶ close
                                                                     └ each a flow run of its own

    asynchronous:   iteration 0  rollout ─▶ reward ─▶ advantage ─▶ update ─▶ weight sync ─▶ …
                    iteration 1             rollout ─▶ reward ───────────────▶ advantage ─▶ update ─▶ …
                    iteration 2                        rollout …               └ tasks/order.py says what waits for what

The log in storage says where to go on: this flow may be started, retried or killed at any moment.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from prefect import flow, runtime
from prefect.exceptions import CancelledRun
from prefect.logging import get_run_logger

from flows.carry_out import carry_out
from flows.identity import named_as_its_run, run_child
from flows.iteration import iteration_flow
from flows.overlapping import Overlapping
from flows.stopping import heeding_signals, stop_here
from tasks.checkpoint import checkpoint
from tasks.due import evaluation_due, is_last, iterations_to_do
from tasks.evaluate import evaluate
from tasks.report import Progress, report_evaluation
from tasks.resume import Resume  # noqa: TC001  Prefect reads the annotations
from tasks.run import OpenRun, default_run_id, opened, resolve_config

if TYPE_CHECKING:
    from rlhf_core.config import Config


@flow(name="rlhf", flow_run_name=named_as_its_run, persist_result=False)
async def train(
    config: str | dict[str, Any] = "grpo_tiny_cpu.yaml",
    overrides: list[str] | None = None,
    run_id: str | None = None,
    resume: Resume = "if-present",
) -> dict[str, Any]:
    """Train a policy.

    Args:
        config: A file, the name of one in configs/, or the configuration itself.
        overrides: Keys set on top, as section.key=value.
        run_id: Names the run; a new one by default. The same id again resumes.
        resume: must - the run has to exist; never - it must not; if-present - either.
    """
    checked = resolve_config(config, overrides or [])
    run_id = run_id or default_run_id(str(runtime.flow_run.name), str(runtime.flow_run.id))
    get_run_logger().info("run %s", run_id)
    return await run_to_its_end(checked, run_id, resume)


async def run_to_its_end(config: Config, run_id: str, resume: Resume, **also: Any) -> dict[str, Any]:
    """Open a run and do all that its log says is not done yet, or as much as there is time for before it is asked to end.

    Args:
        config: checked.
        run_id: see ``train``.
        resume: see ``train``.
        also: what the result says besides.
    """
    with heeding_signals() as stopping:
        async with opened(config, run_id, resume, runtime.flow_run.id) as run:
            stopping.then(run.order.stop)
            return await carry_out(run, lambda: run_iterations(run), **also)


async def run_iterations(run: OpenRun) -> None:
    """Everything that the log says is not done yet.

    Raises:
        RunStoppedError: the run was asked to end before.
    """
    if evaluation_due(run, 0):
        await evaluate(run.run_id, 0)
        await report_evaluation(run.run_id, 0)
    progress = Progress(run)
    todo = await asyncio.to_thread(iterations_to_do, run)
    if todo:
        await progress.show(todo[0])
    async with Overlapping() as children:
        for iteration in todo:
            run.order.begin(iteration)
            await run.order.may_begin(iteration)
            if run.order.stopped:
                break
            if iteration != todo[0] and await asyncio.to_thread(is_last, run, iteration):
                break  # filtering may use up the data before the plan ends
            child = children.start(run_iteration(run, iteration, progress))
            if not run.config.overlaps:
                await child
    left = await asyncio.to_thread(iterations_to_do, run) if run.order.stopped else []
    if left:
        await stop_here(run, checkpoint)
    await progress.show(run.plan.iterations)


async def run_iteration(run: OpenRun, iteration: int, progress: Progress) -> None:
    """One iteration, as a flow run of its own."""
    try:
        await run_child(
            iteration_flow,
            deployment="iteration",
            key=f"{run.run_id}/{iteration:08d}",
            name=f"{run.run_id} iteration {iteration}",
            parameters={
                "run_id": run.run_id,
                "iteration": iteration,
                "storage_root": run.store.root,
                "storage_options": run.store.options,
                "secrets": dict(run.config.run.secrets),
            },
        )
    except CancelledRun:
        if not run.order.stopped:
            raise
        return
    await progress.show(iteration + 1)
