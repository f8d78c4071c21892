"""The stages of a supervised run: train, evaluate, checkpoint, report."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.artifacts import acreate_table_artifact
from prefect.logging import get_run_logger

from rlhf_core.records import Stage
from rlhf_core.telemetry import Stopwatch
from tasks.checkpoint import saved_version
from tasks.evaluate import recorded_evaluation
from tasks.options import TASK_OPTIONS
from tasks.report import artifact_key
from tasks.stages import commit, finished, small
from tasks.supervised_run import OpenSupervisedRun, current_supervised_run, steps_of
from tasks.watch import at_stage


@task(name="train", task_run_name="train {iteration}", **TASK_OPTIONS)
@at_stage("update")
async def train_steps(run_id: str, iteration: int) -> dict[str, Any]:
    """The optimizer steps of one iteration: version ``iteration`` becomes ``iteration + 1``."""
    run = current_supervised_run(run_id)
    if done := await finished(run, iteration, Stage.UPDATE):
        return small(done[1])
    watch = Stopwatch()
    first, steps = steps_of(run, iteration)
    trained = await run.session.heal(iteration, lambda: run.session.train(iteration, first, steps))
    body = {
        **watch.stamp(),
        "version": iteration + 1,
        "digest": trained.digest,
        "optimizer_steps": trained.optimizer_steps,
        "first_step": first,
        "steps": steps,
        "metrics": trained.metrics,
    }
    ref = await commit(run, iteration, Stage.UPDATE, (), [], body)
    line = "  ".join(f"{name}={value:.4g}" for name, value in trained.metrics.items())
    get_run_logger().info("iteration %d of %d: %s", iteration + 1, run.plan.iterations, line)
    return small(ref)


@task(name="evaluate", task_run_name="evaluate {version}", **TASK_OPTIONS)
@at_stage("evaluate")
async def evaluate_examples(run_id: str, version: int) -> dict[str, float]:
    """Metrics of version ``version`` on the held-out examples; an evaluation that is recorded stays.

    Raises:
        ConfigError: it is the first, and has no ``ckpt.best_metric_key``; nothing is recorded then.
    """
    run = current_supervised_run(run_id)
    recorded = await recorded_evaluation(run, version, lambda: _measured(run, version))
    measured: dict[str, float] = recorded["metrics"]
    await acreate_table_artifact(
        key=artifact_key(run_id, "evaluation"),
        table=[{"metric": name, "value": value} for name, value in sorted(measured.items())],
        description=f"Evaluation of version {version} of run {run_id} on {run.plan.held_out} held-out examples",
    )
    line = "  ".join(f"{name}={value:.4g}" for name, value in sorted(measured.items()))
    get_run_logger().info("evaluation of version %d: %s", version, line)
    return dict(measured)


async def _measured(run: OpenSupervisedRun, version: int) -> tuple[tuple[()], dict[str, float], list[Any], list[Any]]:
    return (), await run.session.heal(version, lambda: run.session.evaluate(version)), [], []


@task(name="checkpoint", task_run_name="checkpoint {version}", **TASK_OPTIONS)
@at_stage("checkpoint")
async def checkpoint_model(run_id: str, version: int) -> dict[str, Any]:
    """As ``checkpoint`` of a run by rewards. Where the run stands follows from the version: nothing more is kept."""
    run = current_supervised_run(run_id)

    async def nothing_more() -> dict[str, Any]:
        return {}

    return await saved_version(run, version, run.config.model.world_size, nothing_more)
