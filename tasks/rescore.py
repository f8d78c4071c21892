"""Another reward over the saved trajectories of a run, and what it makes of them."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.artifacts import acreate_image_artifact, acreate_table_artifact
from prefect.logging import get_run_logger

from rlhf_core.cluster.rescoring import digest_of, local_model, plan_rescoring
from rlhf_core.errors import RlhfError
from rlhf_core.lineage import code_revision, package_versions
from rlhf_core.lineage.tracker import check_tracking_uri
from rlhf_core.rewards import check_reward_config, make_reward_source
from rlhf_core.rewards.rescore import rescore_iteration
from rlhf_core.rewards.rescore_report import make_report
from rlhf_core.storage.find_run import find_run
from rlhf_core.storage.rescored import Rescoring, existing_rescoring
from rlhf_core.telemetry import get_logger
from tasks.opening import tracking_uri
from tasks.options import TASK_OPTIONS
from tasks.report import artifact_key, short
from tasks.resume import stored_config

if TYPE_CHECKING:
    from rlhf_core.config import Config
    from rlhf_core.rewards.rescore_report import Report

logger = get_logger(__name__)

DIGITS = 4  # of numbers that people see


@task(name="rescore", task_run_name="rescore {run}", **TASK_OPTIONS)
async def score_again(run: str, sources: list[str], **request: Any) -> dict[str, Any]:
    """Score what is not scored yet. Arguments and errors as ``plan_rescoring``; returns ``name`` and ``iterations``."""
    plan = await asyncio.to_thread(plan_rescoring, run, sources, **request)
    rescoring = Rescoring(plan.store, plan.name)
    await asyncio.to_thread(check_reward_config, plan.config.reward)
    about = {
        "code": code_revision(),
        "packages": package_versions(),
        "reward": plan.config.reward.model_dump(mode="json"),
    }
    await asyncio.to_thread(rescoring.begin, plan.scorer, **about)
    log = get_run_logger()
    log.info("rewards of %s: %s", plan.store.run_id, rescoring.url)
    source = make_reward_source(plan.config.reward, await asyncio.to_thread(local_model, plan))
    try:
        for done, iteration in enumerate(plan.iterations, start=1):
            scored = await rescore_iteration(rescoring, iteration, source)
            log.info("iteration %d: %d samples scored (%d of %d)", iteration, scored, done, len(plan.iterations))
    finally:
        await source.close()
    return {"run": plan.store.url, "name": plan.name, "iterations": plan.iterations}


@task(name="compare rewards", task_run_name="compare {name}", **TASK_OPTIONS)
async def compare_rewards(
    run: str, name: str, iterations: list[int], options: dict[str, Any] | None = None, moved: int = 10
) -> dict[str, Any]:
    """Compare new and old rewards: durable in the run, shown in the UI, told to the tracker. Returns the report as JSON.

    Args:
        run: URL of the run.
        name: of the rescoring.
        iterations: that it has scored.
        options: of the file system.
        moved: how many of the samples that moved most are shown.
    """
    store = await asyncio.to_thread(find_run, run, None, options)
    config = await asyncio.to_thread(stored_config, store)
    rescoring = await asyncio.to_thread(existing_rescoring, store, name)
    report = await asyncio.to_thread(make_report, rescoring, iterations, moved)
    plot = await asyncio.to_thread(rescoring.write_report, report.body, report.plot)
    shown = {**report.body, "old_normalised": config.reward.normalize_enable, "plot": plot, "storage": rescoring.url}
    await acreate_table_artifact(
        key=artifact_key(store.run_id, "rescored"),
        table=[_rounded({"measure": measure, "value": value}) for measure, value in numbers_of(shown)],
        description=f"Rewards of run {store.run_id} and of its rescoring {name}",
    )
    await acreate_table_artifact(
        key=artifact_key(store.run_id, "rescored-moved"),
        table=[_rounded(short(row)) for row in report.body["moved"]],
        description=f"Samples of run {store.run_id} that moved most by the rescoring {name}",
    )
    await acreate_image_artifact(
        image_url=f"data:image/png;base64,{base64.b64encode(report.plot).decode()}",
        key=artifact_key(store.run_id, "rescored-scatter"),
        description=f"Old and new rewards: run {store.run_id}, rescoring {name}",
    )
    return {**shown, "tracker": await asyncio.to_thread(_tell, config, rescoring, report)}


def numbers_of(report: dict[str, Any]) -> list[tuple[str, Any]]:
    """(measure, value) of a report, in the order in which people read them."""
    named = ("samples", "failed_rollouts", "unscored_in_run", "compared", "groups")
    rows: list[tuple[str, Any]] = [(name, report[name]) for name in named]
    rows += [
        (f"{which} {name}", report[which][name]) for which in ("old", "new") for name in ("mean", "std", "min", "max")
    ]
    rows += [(name, report[name]) for name in ("pearson", "spearman")]
    rows += [(name, report[name]) for name in ("advantage_sign_changed", "order_changed", "pairs_swapped")]
    return rows + [(f"failed: {reason}", count) for reason, count in report["failures"].items()]


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, DIGITS) if isinstance(value, float) else value for name, value in row.items()}


def _tell(config: Config, rescoring: Rescoring, report: Report) -> str | None:
    """The tracker's page. One that is away is a warning: the report is in the run's storage."""
    uri = tracking_uri(config)
    if uri is None:
        return None
    check_tracking_uri(uri)
    from rlhf_core.lineage.mlflow.rescoring import MlflowRescoring  # imports mlflow, which takes seconds

    tracker, scorer = MlflowRescoring(uri, config.logger.mlflow_experiment), rescoring.scorer() or {}
    try:
        tracker.tell(report.body, scorer, rescoring.url, report.plot, digest_of(report.body))
    except (RlhfError, OSError) as error:
        logger.warning("the tracker was not told of the rescoring; the same command again tells it: %s", error)
        return None
    return tracker.url
