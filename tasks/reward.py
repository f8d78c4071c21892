"""Trajectories to rewards."""

from __future__ import annotations

from typing import Any

from prefect import task

from rlhf_core.records import Stage
from rlhf_core.telemetry import Stopwatch
from tasks.options import TASK_OPTIONS
from tasks.run import current_run
from tasks.stages import commit, finished, required, small


@task(name="reward", task_run_name="reward {iteration}", **TASK_OPTIONS)
async def reward(run_id: str, iteration: int) -> dict[str, Any]:
    """Score every sample of the iteration."""
    run = current_run(run_id)
    if done := await finished(run, iteration, Stage.REWARD):
        return small(done[1])
    watch = Stopwatch()
    _, rollout = await required(run, iteration, Stage.ROLLOUT)
    scored = await run.session.heal(iteration, lambda: run.session.score(iteration, rollout))
    body = {**watch.stamp(), "metrics": scored.metrics, "failures": scored.failures}
    return small(await commit(run, iteration, Stage.REWARD, scored.parts, [rollout], body))
