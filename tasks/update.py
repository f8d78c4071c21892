"""Experience to a new policy version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefect import task

from rlhf_core.algorithms.kl import make_kl_controller
from rlhf_core.records import Stage, StageManifest
from rlhf_core.telemetry import Stopwatch
from tasks.options import TASK_OPTIONS
from tasks.replay import warn_if_far
from tasks.run import OpenRun, current_run
from tasks.stages import commit, finished, required, small, to_the_end
from tasks.watch import at_stage

if TYPE_CHECKING:
    from rlhf_core.records import StageRef


@task(name="update", task_run_name="update {iteration}", **TASK_OPTIONS)
@at_stage("update")
async def update(run_id: str, iteration: int) -> dict[str, Any]:
    """Train: policy version ``iteration`` becomes ``iteration + 1``."""
    run = current_run(run_id)
    if done := await finished(run, iteration, Stage.UPDATE):
        return small(done[1])
    watch = Stopwatch()
    assembled, experience = await required(run, iteration, Stage.EXPERIENCE)
    kl_coef = float(assembled.body["kl_coef"])

    async def learn() -> StageRef:
        updated = await run.session.update(iteration, experience, kl_coef)
        warn_if_far(run, iteration, updated.metrics)
        body = {
            **watch.stamp(),
            "version": iteration + 1,
            **updated.digests,
            "optimizer_steps": updated.optimizer_steps,
            "kl_coef": kl_coef,
            "kl_coef_next": next_kl_coef(run, assembled, kl_coef, updated.metrics),
            "metrics": updated.metrics,
        }
        # Before anybody else may use the ranks: what an engine is sent stands in the log.
        return await commit(run, iteration, Stage.UPDATE, (), [experience], body)

    # To its end: ranks that are ahead of the log, where it was cut off, would have to be trained anew from the last checkpoint.
    return small(await run.session.heal(iteration, lambda: to_the_end(learn())))


def next_kl_coef(run: OpenRun, assembled: StageManifest, kl_coef: float, metrics: dict[str, float]) -> float:
    """What the controller makes of the true mean KL of this iteration."""
    kl = run.config.algo.kl
    controller = make_kl_controller(kl_coef, kl.target, kl.horizon)
    measured = metrics.get("update/kl", assembled.body["metrics"].get("kl/mean"))
    if measured is None:
        return kl_coef
    return controller.updated(float(measured), assembled.rows).coef
