"""One iteration.

::

    rollout ─▶ reward ─▶ advantage ─▶ update ─▶ weight sync ─▶ (evaluate) ─▶ (checkpoint) ─▶ report, lineage

A version that its evaluation finds to be the best is saved. Each step returns at once where its manifest says that it is done:
running an iteration again costs nothing but what is missing.
"""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import flow

from tasks.advantage import advantage
from tasks.checkpoint import checkpoint
from tasks.due import checkpoint_due, evaluation_due
from tasks.evaluate import evaluate
from tasks.lineage import track
from tasks.report import report, report_evaluation
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.run import open_stored
from tasks.update import update
from tasks.weights import sync_weights


# Parameters are not validated by a model of their own: making it takes longer than everything else about a flow run, and they
# come from the parent.
@flow(
    name="rlhf-iteration",
    flow_run_name="{run_id} iteration {iteration}",
    persist_result=False,
    validate_parameters=False,
)
async def iteration_flow(
    run_id: str, iteration: int, storage_root: str, storage_options: dict[str, Any] | None = None
) -> None:
    """Run one iteration of a run.

    Args:
        run_id: The run.
        iteration: Its number, from 0.
        storage_root: Where the run's log lies; its configuration is read from there.
        storage_options: Options of that file system, as in storage.options.
    """
    async with open_stored(run_id, storage_root, storage_options or {}) as run:
        version = iteration + 1
        await rollout(run_id, iteration)
        await reward(run_id, iteration)
        await advantage(run_id, iteration)
        await update(run_id, iteration)
        await sync_weights(run_id, version)
        if await asyncio.to_thread(evaluation_due, run, version):
            await evaluate(run_id, version)
            await report_evaluation(run_id, version)
        if await asyncio.to_thread(checkpoint_due, run, version):
            await checkpoint(run_id, version)
        await asyncio.gather(report(run_id, iteration), track(run_id))
