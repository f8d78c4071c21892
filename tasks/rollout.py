"""Prompts to trajectories."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from prefect import task

from rlhf_core.records import PromptCursor, Stage
from rlhf_core.telemetry import Stopwatch
from tasks.options import TASK_OPTIONS
from tasks.run import OpenRun, current_run
from tasks.stages import commit, finished, required, small


@task(name="rollout", task_run_name="rollout {iteration}", **TASK_OPTIONS)
async def rollout(run_id: str, iteration: int) -> dict[str, Any]:
    """Sample the iteration's batch with policy version ``iteration``."""
    run = current_run(run_id)
    if done := await finished(run, iteration, Stage.ROLLOUT):
        return small(done[1])
    watch = Stopwatch()
    cursor = await cursor_before(run, iteration)
    outcome = await run.session.heal(iteration, lambda: run.session.rollout(iteration, iteration, cursor))
    body = {
        **watch.stamp(),
        "cursor_in": asdict(cursor),
        "cursor_out": asdict(outcome.cursor),
        "drawn": outcome.drawn,
        "resumed_groups": outcome.resumed_groups,
        "metrics": outcome.metrics,
    }
    return small(await commit(run, iteration, Stage.ROLLOUT, outcome.parts, [], body))


async def cursor_before(run: OpenRun, iteration: int) -> PromptCursor:
    """Where the iteration's draw begins: where the one before ended."""
    if iteration == 0:
        return PromptCursor()
    manifest, _ = await required(run, iteration - 1, Stage.ROLLOUT)
    return PromptCursor(**manifest.body["cursor_out"])
