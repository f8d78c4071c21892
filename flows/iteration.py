"""One iteration.

::

    rollout ─▶ reward ─▶ advantage ─▶ update ─▶ weight sync ─▶ (evaluate) ─▶ (checkpoint) ─▶ report, lineage

A version that its evaluation finds to be the best is saved. Each step returns at once where its manifest says that it is done:
running an iteration again costs nothing but what is missing. What a step waits for of other iterations, where they overlap,
stands in ``tasks/order.py``.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from prefect import flow

from flows.stopping import stopped
from rlhf_core.errors import RunStoppedError
from tasks.advantage import advantage
from tasks.checkpoint import checkpoint
from tasks.due import checkpoint_due, evaluation_due
from tasks.evaluate import evaluate
from tasks.lineage import track
from tasks.order import Step
from tasks.report import report, report_evaluation
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.run import open_stored
from tasks.update import update
from tasks.weights import sync_weights

if TYPE_CHECKING:
    from tasks.run import OpenRun


# Parameters are not validated by a model of their own: making it takes longer than everything else about a flow run, and they
# come from the parent.
@flow(
    name="rlhf-iteration",
    flow_run_name="{run_id} iteration {iteration}",
    persist_result=False,
    validate_parameters=False,
)
async def iteration_flow(
    run_id: str,
    iteration: int,
    storage_root: str,
    storage_options: dict[str, Any] | None = None,
    secrets: dict[str, str] | None = None,
) -> Any:
    """Run one iteration of a run.

    Args:
        run_id: The run.
        iteration: Its number, from 0.
        storage_root: Where the run's log lies; its configuration is read from there.
        storage_options: Options of that file system, as in storage.options.
        secrets: Environment variables and the Prefect blocks with their values, as in run.secrets.
    """
    async with open_stored(run_id, storage_root, storage_options or {}, secrets) as run:
        try:
            await _steps(run, iteration)
        except RunStoppedError as error:
            return stopped(error)
    return None


async def _steps(run: OpenRun, iteration: int) -> None:
    run_id, version, order = run.run_id, iteration + 1, run.order
    order.begin(iteration)
    async with order.step(Step.ROLLOUT, iteration):
        await rollout(run_id, iteration)
    async with order.step(Step.REWARD, iteration):
        await reward(run_id, iteration)
    async with order.step(Step.ADVANTAGE, iteration):
        await advantage(run_id, iteration)
    async with order.step(Step.UPDATE, iteration):
        await update(run_id, iteration)
    async with order.step(Step.PUBLISH, iteration):
        await sync_weights(run_id, version)
        if await asyncio.to_thread(evaluation_due, run, version):
            await evaluate(run_id, version)
            await report_evaluation(run_id, version)
    async with order.step(Step.SAVE, iteration):
        if await asyncio.to_thread(checkpoint_due, run, version):
            await checkpoint(run_id, version)
    await asyncio.gather(report(run_id, iteration), track(run_id))
