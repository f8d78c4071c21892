"""Rewards and log-probs to advantages."""

from __future__ import annotations

from typing import Any

from prefect import task

from rlhf_core.records import Stage
from rlhf_core.telemetry import Stopwatch
from tasks.options import TASK_OPTIONS
from tasks.run import OpenRun, current_run
from tasks.stages import commit, finished, required, small


@task(name="advantage", task_run_name="advantage {iteration}", **TASK_OPTIONS)
async def advantage(run_id: str, iteration: int) -> dict[str, Any]:
    """Everything the update trains on, as experience shards."""
    run = current_run(run_id)
    if done := await finished(run, iteration, Stage.EXPERIENCE):
        return small(done[1])
    watch = Stopwatch()
    played, rollout = await required(run, iteration, Stage.ROLLOUT)
    _, reward = await required(run, iteration, Stage.REWARD)
    kl_coef = await kl_coef_of(run, iteration)
    assembled = await run.session.heal(
        iteration, lambda: run.session.assemble(iteration, rollout, reward, played.body["drawn"], kl_coef)
    )
    body = {**watch.stamp(), "metrics": assembled.metrics, "ledger": assembled.ledger, "kl_coef": kl_coef}
    return small(await commit(run, iteration, Stage.EXPERIENCE, assembled.parts, [rollout, reward], body))


async def kl_coef_of(run: OpenRun, iteration: int) -> float:
    """The KL coefficient of an iteration: what the controller made of the one before."""
    if iteration == 0:
        return run.config.algo.kl.init_coef
    manifest, _ = await required(run, iteration - 1, Stage.UPDATE)
    return float(manifest.body["kl_coef_next"])
