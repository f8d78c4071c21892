"""Scores of one policy version on the held-out prompts."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeAlias

from prefect import task

from rlhf_core.telemetry import Stopwatch
from tasks.best import require_best_metric
from tasks.options import TASK_OPTIONS
from tasks.run import current_run
from tasks.stages import to_the_end
from tasks.watch import at_stage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rlhf_core.records import Part
    from tasks.run import AnyRun, OpenRun

    # shards, metrics, readable rows, the outcome of each held-out prompt
    Measured: TypeAlias = tuple[tuple[Part, ...], dict[str, float], list[dict[str, Any]], list[dict[str, Any]]]


@task(name="evaluate", task_run_name="evaluate {version}", **TASK_OPTIONS)
@at_stage("evaluate")
async def evaluate(run_id: str, version: int) -> dict[str, float]:
    """Evaluate policy version ``version``; one that is recorded stays.

    Raises:
        ConfigError: it is the first, and has no ``ckpt.best_metric_key``; nothing is recorded then.
    """
    run = current_run(run_id)
    body = await recorded_evaluation(run, version, lambda: _measured(run, version))
    return dict(body["metrics"])


async def _measured(run: OpenRun, version: int) -> Measured:
    session = run.session
    parts, rollout = await session.with_engines(version, version, lambda: session.answer(version))
    metrics, samples, outcomes = await session.with_scoring(lambda: session.judge(version, parts))
    return parts, {**metrics, "eval/seconds": rollout["rollout/seconds"]}, samples, outcomes


async def recorded_evaluation(run: AnyRun, version: int, measure: Callable[[], Awaitable[Measured]]) -> dict[str, Any]:
    """The evaluation of a version as the log has it; measured and recorded where it has none.

    Args:
        run: of whatever kind.
        version: of its model.
        measure: gives what is recorded.

    Raises:
        ConfigError: it is the first, and has no ``ckpt.best_metric_key``; nothing is recorded then.
    """
    recorded = await asyncio.to_thread(run.store.read_evaluation, version)
    if recorded is not None:
        return recorded
    watch = Stopwatch()
    parts, metrics, samples, outcomes = await measure()
    if version == 0:
        require_best_metric(run, metrics)
    body = {
        "version": version,
        "parts": [asdict(part) for part in parts],
        "metrics": metrics,
        "samples": samples,
        "outcomes": outcomes,
        "user_code": run.user_code,
        **watch.stamp(),
    }
    run.session.check_lease()
    return await to_the_end(asyncio.to_thread(run.store.write_evaluation, version, body))
