"""A run that learns from given examples.

::

    configuration ─▶ open: log, lease, ranks ─▶ (evaluate v0) ─▶ train 0 ─▶ (evaluate) ─▶ (checkpoint) ─▶ train 1 … ─▶ close
                                                                 └ steps_per_iteration optimizer steps

The log in storage says where to go on: such a flow may be started, retried or killed at any moment.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from prefect import runtime
from prefect.logging import get_run_logger

from flows.carry_out import carry_out
from flows.stopping import Stopping, heeding_signals, stop_here
from tasks.due import checkpoint_due, evaluation_due, iterations_to_do
from tasks.lineage import track
from tasks.report import Progress
from tasks.run import default_run_id
from tasks.supervised import checkpoint_model, evaluate_examples, train_steps
from tasks.supervised_run import OpenSupervisedRun, opened_supervised, resolve_supervised_config

if TYPE_CHECKING:
    from rlhf_core.config import Method
    from tasks.resume import Resume


async def run_supervised(
    method: Method,
    config: str | dict[str, Any],
    overrides: list[str] | None,
    run_id: str | None,
    resume: Resume,
) -> dict[str, Any]:
    """The body of the flows ``sft``, ``reward_model`` and ``dpo``; arguments as ``train``."""
    checked = resolve_supervised_config(config, overrides or [])
    run_id = run_id or default_run_id(str(runtime.flow_run.name), str(runtime.flow_run.id))
    get_run_logger().info("run %s", run_id)
    with heeding_signals() as stopping:
        async with opened_supervised(method, checked, run_id, resume, runtime.flow_run.id) as run:
            return await carry_out(run, lambda: _iterations(run, stopping))


async def _iterations(run: OpenSupervisedRun, stopping: Stopping) -> None:
    """Everything that the log says is not done yet.

    Raises:
        RunStoppedError: the run was asked to end before.
    """
    if evaluation_due(run, 0):
        await evaluate_examples(run.run_id, 0)
    progress = Progress(run)
    for iteration in await asyncio.to_thread(iterations_to_do, run):
        if stopping.asked:
            await stop_here(run, checkpoint_model)
        version = iteration + 1
        await progress.show(iteration)
        await train_steps(run.run_id, iteration)
        if evaluation_due(run, version):
            await evaluate_examples(run.run_id, version)
        if await asyncio.to_thread(checkpoint_due, run, version):
            await checkpoint_model(run.run_id, version)
        await track(run.run_id)
    await progress.show(run.plan.iterations)
