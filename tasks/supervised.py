"""The stages of a supervised run: train, evaluate, checkpoint, report."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from prefect import task
from prefect.artifacts import acreate_table_artifact
from prefect.logging import get_run_logger

from rlhf_core.records import Stage
from rlhf_core.storage import CheckpointStore
from rlhf_core.telemetry import Stopwatch
from tasks.best import best_of
from tasks.checkpoint import settle
from tasks.evaluate import recorded_evaluation
from tasks.options import TASK_OPTIONS
from tasks.report import artifact_key
from tasks.stages import commit, finished, required, small
from tasks.supervised_run import OpenSupervisedRun, current_supervised_run, steps_of


@task(name="train", task_run_name="train {iteration}", **TASK_OPTIONS)
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


async def _measured(run: OpenSupervisedRun, version: int) -> tuple[tuple[()], dict[str, float], list[dict[str, Any]]]:
    return (), await run.session.evaluate(version), []


@task(name="checkpoint", task_run_name="checkpoint {version}", **TASK_OPTIONS)
async def checkpoint_model(run_id: str, version: int) -> dict[str, Any]:
    """Save version ``version``: visible only whole; nothing to do where it is saved already. Then the rotation."""
    run = current_supervised_run(run_id)
    best = await asyncio.to_thread(best_of, run, version)
    checkpoints = CheckpointStore(run.store)
    newest = await asyncio.to_thread(checkpoints.newest)
    watch = Stopwatch()
    if newest is None or newest[0] < version:
        files = await run.session.heal(version, lambda: run.session.save(version))
        manifest, _ = await required(run, version - 1, Stage.UPDATE)
        body = {
            "version": version,
            "iteration": version,  # the next one to run
            **await run.session.digests(),
            "optimizer_steps": manifest.body["optimizer_steps"],
            "best": None if best is None else asdict(best),
            "world_size": run.config.model.world_size,
            "zero_stage": run.config.ds.zero_stage,
            **watch.stamp(),
        }
        run.session.check_lease()
        await asyncio.to_thread(checkpoints.commit, version, body, files)
    run.session.check_lease()
    deleted = await asyncio.to_thread(settle, run, version, best)
    return {"version": version, "best": None if best is None else asdict(best), "deleted": deleted, **watch.stamp()}
