"""Experience to a new policy version."""

from __future__ import annotations

from typing import Any

from prefect import task

from rlhf_core.algorithms.kl import make_kl_controller
from rlhf_core.records import Stage, StageManifest
from rlhf_core.telemetry import Stopwatch
from tasks.options import TASK_OPTIONS
from tasks.run import OpenRun, current_run
from tasks.stages import commit, finished, required, small


@task(name="update", task_run_name="update {iteration}", **TASK_OPTIONS)
async def update(run_id: str, iteration: int) -> dict[str, Any]:
    """Train: policy version ``iteration`` becomes ``iteration + 1``."""
    run = current_run(run_id)
    if done := await finished(run, iteration, Stage.UPDATE):
        return small(done[1])
    watch = Stopwatch()
    assembled, experience = await required(run, iteration, Stage.EXPERIENCE)
    kl_coef = float(assembled.body["kl_coef"])
    updated = await run.session.heal(iteration, lambda: run.session.update(iteration, experience, kl_coef))
    body = {
        **watch.stamp(),
        "version": iteration + 1,
        **updated.digests,
        "optimizer_steps": updated.optimizer_steps,
        "kl_coef": kl_coef,
        "kl_coef_next": next_kl_coef(run, assembled, kl_coef, updated.metrics),
        "metrics": updated.metrics,
    }
    return small(await commit(run, iteration, Stage.UPDATE, (), [experience], body))


def next_kl_coef(run: OpenRun, assembled: StageManifest, kl_coef: float, metrics: dict[str, float]) -> float:
    """What the controller makes of the true mean KL of this iteration."""
    kl = run.config.algo.kl
    controller = make_kl_controller(kl_coef, kl.target, kl.horizon)
    measured = metrics.get("update/kl", assembled.body["metrics"].get("kl/mean"))
    if measured is None:
        return kl_coef
    return controller.updated(float(measured), assembled.rows).coef
