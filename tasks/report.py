"""What people see in the UI: sample answers, metrics, progress, and the way to the tracker."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.artifacts import (
    acreate_link_artifact,
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)
from prefect.logging import get_run_logger

from rlhf_core.records import Stage
from rlhf_core.telemetry import in_stage
from tasks.lineage import iteration_metrics
from tasks.options import TASK_OPTIONS
from tasks.run import current_run
from tasks.stages import required

if TYPE_CHECKING:
    from tasks.run import AnyRun

# Characters of a prompt or an answer in a table.
CELL = 400

# What an iteration's line in the log shows.
HEADLINE = ("reward/mean", "rollout/length_mean", "rollout/tokens_per_second", "update/policy_loss", "update/grad_norm")


@task(name="report", task_run_name="report {iteration}", **TASK_OPTIONS)
@in_stage("report")
async def report(run_id: str, iteration: int) -> dict[str, float]:
    """Artifacts of an iteration: sample answers with rewards, and every metric."""
    run = current_run(run_id)
    _, rollout = await required(run, iteration, Stage.ROLLOUT)
    _, reward = await required(run, iteration, Stage.REWARD)
    rows = await run.session.with_scoring(lambda: run.session.samples(rollout, reward, run.config.run.sample_rows))
    metrics = await asyncio.to_thread(iteration_metrics, run.store, iteration)
    await acreate_table_artifact(
        key=artifact_key(run_id, "samples"),
        table=[short(row) for row in rows],
        description=f"Sample answers of iteration {iteration} of run {run_id}, best and worst first",
    )
    await acreate_table_artifact(
        key=artifact_key(run_id, "metrics"),
        table=[{"metric": name, "value": value} for name, value in sorted(metrics.items())],
        description=f"Metrics of iteration {iteration} of run {run_id}",
    )
    line = "  ".join(f"{name}={metrics[name]:.4g}" for name in HEADLINE if name in metrics)
    get_run_logger().info("iteration %d of %d: %s", iteration + 1, run.plan.iterations, line)
    return {name: metrics[name] for name in HEADLINE if name in metrics}


@task(name="report evaluation", task_run_name="report evaluation {version}", **TASK_OPTIONS)
@in_stage("evaluate")
async def report_evaluation(run_id: str, version: int) -> None:
    """Artifacts of an evaluation."""
    run = current_run(run_id)
    recorded = await asyncio.to_thread(run.store.read_evaluation, version)
    if recorded is None:
        return
    metrics: dict[str, float] = recorded["metrics"]
    await acreate_table_artifact(
        key=artifact_key(run_id, "evaluation"),
        table=[
            *({"metric": name, "value": value} for name, value in sorted(metrics.items())),
            *({"metric": "sample", **short(row)} for row in recorded["samples"]),
        ],
        description=f"Evaluation of policy version {version} of run {run_id}",
    )
    get_run_logger().info(
        "evaluation of version %d: %s", version, "  ".join(f"{k}={v:.4g}" for k, v in sorted(metrics.items()))
    )


class Progress:
    """The progress artifact of a run."""

    def __init__(self, run: AnyRun) -> None:
        self._run = run
        self._artifact: Any = None
        self._done = 0

    async def show(self, iterations_done: int) -> None:
        """Draw it; iterations that overlap may end out of order."""
        self._done = max(self._done, iterations_done)
        percent = 100.0 * self._done / max(1, self._run.plan.iterations)
        if self._artifact is None:
            self._artifact = await acreate_progress_artifact(
                percent,
                key=artifact_key(self._run.run_id, "progress"),
                description=f"Iterations of run {self._run.run_id}",
            )
        else:
            await aupdate_progress_artifact(self._artifact, percent)


async def link_tracker(run_id: str, url: str | None) -> None:
    """A link to the tracker's page, where it has one."""
    if url is not None:
        await acreate_link_artifact(
            url, link_text="MLflow run", key=artifact_key(run_id, "mlflow"), description=f"MLflow run of {run_id}"
        )


def artifact_key(run_id: str, what: str) -> str:
    """Prefect allows lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", f"{run_id}-{what}".lower()).strip("-")


def short(row: dict[str, Any]) -> dict[str, Any]:
    """A readable row with texts that fit a table."""
    return {**row, **{name: cell(str(row[name])) for name in ("prompt", "answer", "label") if row[name] is not None}}


def cell(text: str) -> str:
    """A text as a table cell."""
    return text if len(text) <= CELL else f"{text[:CELL]} … ({len(text)} characters)"
