"""What the opening of runs of all kinds has in common.

::

    log, tracker, cluster ─ prepare ─▶ Prepared ─ start_processes ─▶ the data are known ─ fix_plan ─▶ run.json
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.cluster.connect import connect
from rlhf_core.cluster.context import open_store
from rlhf_core.cluster.session import cores
from rlhf_core.data import pin_models
from rlhf_core.errors import ConfigError, WorkerError
from rlhf_core.lineage import (
    changed_code,
    code_revision,
    machine,
    make_metric_trackers,
    make_tracker,
    package_versions,
    user_code,
)
from rlhf_core.storage import read_worlds
from rlhf_core.telemetry import get_logger, log_format, say_in_json
from tasks.attempts import earlier_attempt_over
from tasks.plan import RunPlan
from tasks.resume import KIND, check_resume, different_keys
from tasks.secrets import load_secrets
from tasks.worlds import move, ranks_change

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from rlhf_core.cluster.actor_session import ActorSession
    from rlhf_core.cluster.placement import Node
    from rlhf_core.config import Config, SupervisedConfig
    from rlhf_core.data import PinnedModel
    from rlhf_core.lineage import Tracker
    from rlhf_core.storage import RunStore
    from tasks.resume import Resume
    from tasks.supervised_run import SupervisedPlan

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known of a run before its processes are started."""

    store: RunStore
    body: dict[str, Any] | None  # of run.json; None if the run is new
    models: dict[str, PinnedModel]
    tracker: Tracker
    metric_trackers: list[Tracker]
    nodes: list[Node]  # of the cluster
    user_code: dict[str, str]  # the user's Python files -> sha256
    moves: bool = False  # it goes on with other processes than before
    cpu_threads: int | None = None  # of each training rank, where they are to stay as they were


async def prepare(
    config: Config | SupervisedConfig,
    run_id: str,
    resume: Resume,
    flow_run_id: str | None,
    models: Mapping[str, str],
    kind: str = KIND,
) -> Prepared:
    """What the log, the tracker and the cluster say of a run.

    Args:
        config: checked configuration.
        run_id: names the run.
        resume: see ``opened``.
        flow_run_id: see ``opened``.
        models: role -> name.
        kind: of run.

    Raises:
        ConfigError: the run's log and the request do not fit, or a model or a secret cannot be found.
        WorkerError: there is no such cluster.
    """
    if log_format(config.logger.log_format) == "json":
        say_in_json()
    await load_secrets(config.run.secrets)
    store = open_store(config, run_id)
    await asyncio.to_thread(store.objects.probe)
    await earlier_attempt_over(store, flow_run_id)
    body = await asyncio.to_thread(store.read_run)
    changed = await asyncio.to_thread(check_resume, body, config, store, resume, flow_run_id, kind)
    pinned = await asyncio.to_thread(pin_models, models, config.storage, (body or {}).get("models"))
    tracker = await asyncio.to_thread(
        make_tracker, tracking_uri(config), config.logger.mlflow_experiment, config.logger.mlflow_model
    )
    metric_trackers = make_metric_trackers(config.logger)
    nodes = await asyncio.to_thread(connect, config.run.ray_address)
    code = await asyncio.to_thread(user_code, config.model_dump(mode="json"))
    _warn_of_changed_code(store, body, code)
    worlds = await asyncio.to_thread(read_worlds, store)
    threads = worlds[-1].cpu_threads if worlds else (body or {}).get("cpu_threads")
    return Prepared(
        store,
        body,
        pinned,
        tracker,
        metric_trackers,
        nodes,
        code,
        bool(changed),
        None if ranks_change(changed) else threads,
    )


async def start_processes(
    known: Prepared,
    session: ActorSession,
    config: Config | SupervisedConfig,
    threads: int,
    open_session: Callable[[], Awaitable[Any]],
) -> None:
    """Start the processes of a session; one that dies while starting costs another attempt, not the run."""
    attempts = config.run.max_restarts + 1
    try:
        # Those of an attempt that died before it was recorded may hold what the names meant then; those that a run had before
        # it goes on with others do not meet with them.
        if known.body is None or known.moves:
            await session.discard_actors()
        if known.moves:
            await asyncio.to_thread(move, known.store, config, threads)
        for attempt in range(1, attempts + 1):
            try:
                await open_session()
            except WorkerError as error:
                if attempt == attempts:
                    raise
                logger.warning("starting the workers again (attempt %d of %d failed): %s", attempt, attempts, error)
                await session.discard_actors()
            else:
                return
    except BaseException:
        await session.close(keep_actors=False)
        raise


async def fix_plan(known: Prepared, document: dict[str, Any], plan: RunPlan | SupervisedPlan, data_key: str) -> None:
    """Record what a new run will do, and with which models; compare it with the record of one that goes on.

    Args:
        known: of the run.
        document: run.json of a new run, without its models.
        plan: by the data as they are now.
        data_key: where they come from.

    Raises:
        ConfigError: the data are not those that the run was started with.
    """
    store = known.store
    body = await asyncio.to_thread(store.read_run)
    if body is None:
        models = {role: model.to_json() for role, model in known.models.items()}
        await asyncio.to_thread(store.write_run, {**document, "models": models, "user_code": known.user_code})
    elif type(plan)(**body["plan"]) != plan:
        what = "prompts" if isinstance(plan, RunPlan) else "examples"
        raise ConfigError(
            f"{store.url}: the {what} are not those the run was started with "
            f"({different_keys(body['plan'], asdict(plan))}): restore {data_key}, or choose another run_id"
        )


def run_document(
    config: Config | SupervisedConfig,
    run_id: str,
    plan: RunPlan | SupervisedPlan,
    flow_run_id: str | None,
    kind: str = KIND,
) -> dict[str, Any]:
    """``run.json``."""
    return {
        "run_id": run_id,
        "kind": kind,
        "flow_run_id": flow_run_id,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": config.train.seed,
        "config": config.model_dump(mode="json"),
        "plan": asdict(plan),
        "code": code_revision(),
        "packages": package_versions(),
        "machine": machine(),
    }


def fixed_threads(known: Prepared, config: Config | SupervisedConfig, learning: int) -> int:
    """CPU threads of each of ``learning`` training ranks. Sums of floats depend on them: a resumed run keeps its own."""
    return int(known.cpu_threads or config.run.cpu_threads or max(1, cores() // learning))


def tracking_uri(config: Config | SupervisedConfig) -> str | None:
    """Where MLflow is; None: nowhere."""
    return config.logger.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI")


def model_cache() -> str:
    """Folder of built-in models and fetched checkpoints, the same for every worker of this machine."""
    return str(Path(os.environ.get("RLHF_HOME", ".rlhf")).absolute() / "models")


def _warn_of_changed_code(store: RunStore, body: dict[str, Any] | None, code: dict[str, str]) -> None:
    """A mended reward file is welcome; that the run was not made by one code alone stands in its manifests."""
    changed = changed_code(body["user_code"], code) if body is not None and "user_code" in body else []
    if changed:
        logger.warning("%s goes on with other code than it was started with: %s", store.url, "; ".join(changed))
