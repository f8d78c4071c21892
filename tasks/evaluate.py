"""Scores of one policy version on the held-out prompts."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

from prefect import task

from rlhf_core.telemetry import Stopwatch
from tasks.best import require_best_metric
from tasks.options import TASK_OPTIONS
from tasks.run import current_run


@task(name="evaluate", task_run_name="evaluate {version}", **TASK_OPTIONS)
async def evaluate(run_id: str, version: int) -> dict[str, float]:
    """Evaluate policy version ``version``; one that is recorded stays.

    Raises:
        ConfigError: it is the first, and has no ``ckpt.best_metric_key``; nothing is recorded then.
    """
    run = current_run(run_id)
    recorded = await asyncio.to_thread(run.store.read_evaluation, version)
    if recorded is None:
        watch = Stopwatch()
        parts, metrics, samples = await run.session.heal(version, lambda: run.session.evaluate(version))
        if version == 0:
            require_best_metric(run, metrics)
        body = {
            "version": version,
            "parts": [asdict(part) for part in parts],
            "metrics": metrics,
            "samples": samples,
            **watch.stamp(),
        }
        run.session.check_lease()
        recorded = await asyncio.to_thread(run.store.write_evaluation, version, body)
    return dict(recorded["metrics"])
