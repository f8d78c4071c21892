"""How a run goes, told to Prometheus while it goes (docs/observability.md).

::

    tasks ── at_stage ───────────▶ stages under way, their seconds, their errors  ┐
    the log ── PrometheusTracker ▶ the metrics of iterations                      ├─▶ RunMetrics ─▶ endpoint
    the processes ── Observer ───▶ queues, KV cache, memory, GPUs; every 5 s      ┘

Without ``logger.prometheus_port`` nothing of it is made; the log lines of a stage say where they are in any case. What cannot
be observed is a warning, once, and never ends the run.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from rlhf_core.config import Config
from rlhf_core.lineage.prometheus import PrometheusTracker
from rlhf_core.telemetry import Stopwatch, at, get_logger, in_stage
from rlhf_core.telemetry.exposition import Endpoint, RunMetrics
from tasks.due import newest_version
from tasks.telling import Telling

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from rlhf_core.cluster.observation import Observer, Sight
    from tasks.run import AnyRun

logger = get_logger(__name__)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

LOOK_SECONDS = 5.0  # between two looks at the processes
PROCESSES = (  # families that say what is now: whoever is gone is not shown any more
    "rlhf_groups_in_flight",
    "rlhf_engine_requests_running",
    "rlhf_engine_requests_waiting",
    "rlhf_engine_kv_cache_usage_ratio",
    "rlhf_process_resident_memory_bytes",
    "rlhf_object_store_used_bytes",
    "rlhf_object_store_capacity_bytes",
    "rlhf_gpu_memory_used_bytes",
    "rlhf_gpu_memory_total_bytes",
    "rlhf_gpu_utilization_ratio",
)

_WATCHED: dict[str, RunMetrics] = {}  # by run id, those of this process


def at_stage(
    stage: str,
) -> Callable[[Callable[Arguments, Awaitable[Result]]], Callable[Arguments, Awaitable[Result]]]:
    """Around the function of a task with a ``run_id``: log lines and the endpoint know that the stage is under way."""

    def around(work: Callable[Arguments, Awaitable[Result]]) -> Callable[Arguments, Awaitable[Result]]:
        signature = inspect.signature(work)

        @wraps(work)
        async def measured(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            metrics = _WATCHED.get(signature.bind(*args, **kwargs).arguments["run_id"])
            if metrics is None:
                return await work(*args, **kwargs)
            watch = Stopwatch()
            metrics.add("rlhf_stage_active", 1, stage=stage)
            try:
                result = await work(*args, **kwargs)
            except Exception as error:
                metrics.add("rlhf_stage_errors_total", stage=stage, error=type(error).__name__)
                raise
            finally:
                metrics.add("rlhf_stage_active", -1, stage=stage)
            metrics.observe("rlhf_stage_seconds", watch.seconds, stage=stage)
            return result

        return in_stage(stage)(measured)

    return around


@asynccontextmanager
async def watched(run: AnyRun) -> AsyncIterator[None]:
    """Within, log lines name the run; and where the configuration asks for it, it is watched."""
    with at(run_id=run.run_id):
        metrics = RunMetrics({"run_id": run.run_id, **what_it_is(run)})
        endpoint = _listen(run, metrics)
        if endpoint is None:
            yield
            return
        told = await asyncio.to_thread(newest_version, run)
        metrics.set("rlhf_iterations", told)
        metrics.set("rlhf_iterations_planned", run.plan.iterations)
        run.tellings.append(Telling(PrometheusTracker(metrics, told), beside=True))
        observer = run.session.observer()
        looking = asyncio.create_task(_look_forever(run, observer, metrics))
        _WATCHED[run.run_id] = metrics
        try:
            yield
        finally:
            del _WATCHED[run.run_id]
            looking.cancel()
            await asyncio.wait([looking])
            observer.close()
            await asyncio.to_thread(endpoint.close)


def _listen(run: AnyRun, metrics: RunMetrics) -> Endpoint | None:
    """The endpoint; None where none is wanted, or none can be."""
    wanted = run.config.logger
    if wanted.prometheus_port is None:
        return None
    try:
        endpoint = Endpoint.open(metrics, wanted.prometheus_host, wanted.prometheus_port, target_file(run.run_id))
    except OSError as error:
        logger.warning("nobody can watch the run: no endpoint at %s: %s", wanted.prometheus_host, error)
        return None
    logger.info("metrics of the run: %s", endpoint.url)
    return endpoint


def target_file(run_id: str) -> Path:
    """Where Prometheus finds the endpoint of a run of this machine."""
    return Path(os.environ.get("RLHF_HOME", ".rlhf")).absolute() / "prometheus" / f"{run_id}.json"


def what_it_is(run: AnyRun) -> dict[str, str]:
    """Labels by which people compare runs."""
    if not isinstance(run.config, Config):
        return {"pipeline": "supervised", "algorithm": run.method}
    config = run.config
    pipeline = "replay" if config.is_replay else "partial" if config.pauses_requests else "async"
    return {
        "pipeline": pipeline if config.is_replay or config.overlaps else "sync",
        "algorithm": config.algo.advantage.estimator,
    }


async def _look_forever(run: AnyRun, observer: Observer, metrics: RunMetrics) -> None:
    told = False
    while True:
        began = time.monotonic()
        try:
            show(metrics, run, await observer.look())
        except Exception as error:  # noqa: BLE001  whatever it is: the run goes on, and its cluster's end is told elsewhere
            if not told:
                logger.warning("the processes of the run cannot be looked at: %s: %s", type(error).__name__, error)
            told = True
        await asyncio.sleep(max(0.5, LOOK_SECONDS - (time.monotonic() - began)))


def show(metrics: RunMetrics, run: AnyRun, sight: Sight) -> None:
    """What was seen, in place of what was seen before."""
    metrics.forget(*PROCESSES)
    metrics.set("rlhf_observed_timestamp_seconds", time.time())
    metrics.set("rlhf_worker_rebuilds_total", len(run.session.restarts))
    syncs: int = getattr(run.session, "syncs", 0)  # a supervised run has no engines
    if syncs:
        metrics.forget("rlhf_weight_sync_seconds")
        metrics.observe("rlhf_weight_sync_seconds", run.session.sync_seconds, syncs)  # type: ignore[union-attr]
    if sight.groups_in_flight is not None:
        metrics.set("rlhf_groups_in_flight", sight.groups_in_flight)
    for name, load in sight.engines.items():
        metrics.set("rlhf_engine_requests_running", load.running, engine=name)
        metrics.set("rlhf_engine_requests_waiting", load.waiting, engine=name)
        metrics.set("rlhf_engine_kv_cache_usage_ratio", load.kv_cache_usage, engine=name)
        metrics.set("rlhf_engine_tokens_total", load.tokens, engine=name)
    for address, node in sight.nodes.items():
        for process, held in node.resident.items():
            metrics.set("rlhf_process_resident_memory_bytes", held, process=process)
        if node.store_used is not None and node.store_capacity is not None:
            metrics.set("rlhf_object_store_used_bytes", node.store_used, node=address)
            metrics.set("rlhf_object_store_capacity_bytes", node.store_capacity, node=address)
        for gpu in node.gpus:
            which: dict[str, Any] = {"node": address, "gpu": str(gpu.index)}
            metrics.set("rlhf_gpu_memory_used_bytes", gpu.used_bytes, **which)
            metrics.set("rlhf_gpu_memory_total_bytes", gpu.total_bytes, **which)
            metrics.set("rlhf_gpu_utilization_ratio", gpu.utilization, **which)
