"""Opening and closing a run: what the configuration, the log and the cluster say must fit together before anything is done.

Several flows of one process (a run and its iterations) share the run's open session; a retried iteration opens its own.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from rlhf_core.cluster.connect import connect
from rlhf_core.cluster.context import WorkerContext, open_store
from rlhf_core.cluster.groups import ActorGroups, run_members
from rlhf_core.cluster.placement import place
from rlhf_core.cluster.replay import Replay, facts_of, new_replay, source_store
from rlhf_core.cluster.session import PlannedSteps, RunSession, cores
from rlhf_core.config import Config, SupervisedConfig, load_config, parse_config, parse_supervised_config
from rlhf_core.config.differences import differences
from rlhf_core.data import PinnedModel, models_of, pin_models
from rlhf_core.errors import ConfigError, WorkerError
from rlhf_core.lineage import Tracker, changed_code, code_revision, machine, make_tracker, package_versions, user_code
from rlhf_core.records import Stage
from rlhf_core.storage import LeaseOwner, RunStore, acquire, read_worlds
from rlhf_core.telemetry import get_logger
from tasks.attempts import earlier_attempt_over
from tasks.best import is_best, is_saved
from tasks.worlds import begins_a_world, in_newest_world, is_move, may_move, move, ranks_change

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from rlhf_core.cluster.actor_session import ActorSession
    from rlhf_core.cluster.rollout_worker import DataFacts
    from tasks.supervised_run import OpenSupervisedRun, SupervisedPlan

    AnyRun: TypeAlias = "OpenRun | OpenSupervisedRun"

logger = get_logger(__name__)

Run = TypeVar("Run", bound="AnyRun")

Resume = Literal["must", "if-present", "never"]
KIND = "rlhf"  # of a run by rewards, in run.json

# Sections and keys that say how a run is operated, not what it computes: they may change between two attempts.
OPERATIONAL = (
    "run",
    "logger",
    "storage",
    "vllm.sync_timeout",
    "vllm.request_timeout",
    "vllm.gpu_memory_utilization",
    "rollout.publish_groups",
    "ckpt.max_num",
    "ckpt.max_mem",
    "rollout.max_consecutive_failures",
    "reward.timeout",
    "reward.num_workers",
    "reward.max_retries",
    "reward.remote_batch_size",
    "reward.remote_concurrency",
    "reward.remote_token_env",
    "reward.model_num_ranks",
    "ds.use_universal_ckpt",
)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What the whole run will do; fixed when it first starts."""

    prompts: int
    dropped: int
    fingerprint: str
    iterations: int
    total_steps: int  # of the policy
    critic_steps: int = 0


@dataclass(slots=True)
class OpenRun:
    """A run that this process works on."""

    run_id: str
    config: Config
    store: RunStore
    session: RunSession
    plan: RunPlan
    tracker: Tracker
    tracked: bool = False  # the tracker knows the run
    told_kept: list[int] | None = None  # the checkpoints that the tracker was told are still there
    replay: Replay | None = None  # where its trajectories come from, if it samples none
    user_code: dict[str, str] = field(
        default_factory=dict
    )  # the user's Python files, as this attempt loads them -> sha256


_OPEN: dict[str, AnyRun] = {}


def current_any_run(run_id: str) -> AnyRun:
    """The open run, of whatever kind; tasks look it up instead of carrying it."""
    return _OPEN[run_id]


def current_run(run_id: str) -> OpenRun:
    """The open run by rewards."""
    run = _OPEN[run_id]
    assert isinstance(run, OpenRun), "tasks are called for runs of their kind"
    return run


@asynccontextmanager
async def working_on(run: Run) -> AsyncIterator[Run]:
    """The run is this process's while the block lasts; the processes of one that breaks off are left to the next attempt."""
    _OPEN[run.run_id] = run
    succeeded = False
    try:
        yield run
        succeeded = True
    finally:
        del _OPEN[run.run_id]
        await run.session.close(keep_actors=not succeeded)


@asynccontextmanager
async def opened(
    config: Config, run_id: str, resume: Resume = "if-present", flow_run_id: str | None = None
) -> AsyncIterator[OpenRun]:
    """The run, with all its processes; shared with flows of this process that opened it already.

    Args:
        config: checked configuration.
        run_id: names the run in storage, in Ray and in the tracker.
        resume: ``must``: it has to exist; ``never``: it must not; ``if-present``: either.
        flow_run_id: of the flow run that asks: its own retry may resume even with ``never``.

    Raises:
        ConfigError: the run's log and the request do not fit; the message says where they differ.
        LeaseError: another process works on the run.
    """
    if run_id in _OPEN:
        yield current_run(run_id)
        return
    async with working_on(await _open(config, run_id, resume, flow_run_id)) as run:
        yield run


@asynccontextmanager
async def open_stored(run_id: str, root: str, options: dict[str, Any]) -> AsyncIterator[OpenRun]:
    """A run that exists already, with the configuration it was started with."""
    if run_id in _OPEN:
        yield current_run(run_id)
        return
    config = await asyncio.to_thread(stored_config, RunStore(run_id, root, options))
    async with opened(config, run_id, "must") as run:
        yield run


def resolve_config(config: str | dict[str, Any], overrides: Sequence[str]) -> Config:
    """The checked configuration of a flow's parameters: a file's name, or the mapping itself."""
    return load_config(config, overrides) if isinstance(config, str) else parse_config(config, overrides)


def default_run_id(flow_run_name: str, flow_run_id: str) -> str:
    """Readable, unique, fit to name a folder, and the same when the flow run is retried."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", flow_run_name)[:100]
    return f"{readable}-{flow_run_id[:8]}"


def iterations_to_do(run: AnyRun) -> list[int]:
    """What is left, by the log: an iteration is done when its update, and what was due after it, are recorded."""
    newest = run.store.newest_update()
    if newest is None:
        return list(range(run.plan.iterations))
    iteration = newest[0]
    version = iteration + 1
    evaluated = not evaluation_due(run, version) or run.store.read_evaluation(version) is not None
    saved = not checkpoint_due(run, version) or is_saved(run, version)
    end = version if is_last(run, version) else run.plan.iterations
    return list(range(iteration if not (evaluated and saved) else version, end))


def newest_version(run: AnyRun) -> int:
    """The version that the run's model has come to."""
    newest = run.store.newest_update()
    return 0 if newest is None else newest[0] + 1


def is_last(run: AnyRun, version: int) -> bool:
    """True if the run ends with this version: the plan does, or its last prompt went into the iteration that made it.

    Filtering trains fewer prompts than it draws, so that the data may end before the plan; a replay draws none.
    """
    if version == run.plan.iterations:
        return True
    if version == 0 or isinstance(run.config, SupervisedConfig):
        return False
    if run.config.is_replay or not run.config.fills_batches:
        return False
    found = run.store.stage(version - 1, Stage.ROLLOUT)
    if found is None:
        return False
    body = found[0].body
    return bool(body["cursor_out"]["epoch"] >= run.config.train.num_episodes and not body["buffered"])


def checkpoint_due(run: AnyRun, version: int) -> bool:
    """True if this version is to be saved: every ``ckpt.save_steps``, the last, and the best. Ask after its evaluation.

    So is the one from which the run went on with other processes: see ``worlds``.
    """
    every = run.config.ckpt.save_steps
    due = is_last(run, version) or (every > 0 and version % every == 0) or is_best(run, version)
    return due or begins_a_world(run.store, version)


def evaluation_due(run: AnyRun, version: int) -> bool:
    """True if this version is to be evaluated: the first, the last, and every ``eval.steps``."""
    evaluation = run.config.eval
    if not evaluation.dataset:
        return False
    return version == 0 or is_last(run, version) or (evaluation.steps > 0 and version % evaluation.steps == 0)


def stored_config(store: RunStore) -> Config:
    """The configuration a run was started with, and the processes it was last resumed with.

    Raises:
        ConfigError: there is no such run.
    """
    body = store.read_run()
    if body is None:
        raise ConfigError(f"no run at {store.url}: check the run_id and storage.root")
    return parse_config(in_newest_world(body["config"], read_worlds(store)), source=store.url_of("run.json"))


def check_resume(
    body: dict[str, Any] | None,
    config: Config | SupervisedConfig,
    store: RunStore,
    resume: Resume,
    flow_run_id: str | None,
    kind: str = KIND,
) -> dict[str, tuple[Any, Any]]:
    """Refuse a start that does not fit what the log holds.

    Returns:
        What differs of a run that may go on with other processes: dotted keys, (old, new).

    Args:
        body: of run.json; None if there is no such run.
        config: what is to be run.
        store: the run's log.
        resume: whether the run may, must or must not exist.
        flow_run_id: of the flow run that asks.
        kind: of run: by rewards, or the method of a supervised one.
    """
    if body is None:
        if resume == "must":
            raise ConfigError(f"resume=must, but there is no run at {store.url}: check run_id and storage.root")
        return {}
    own_retry = flow_run_id is not None and body.get("flow_run_id") == flow_run_id
    if resume == "never" and not own_retry:
        raise ConfigError(f"resume=never, but a run exists at {store.url}: choose another run_id, or resume=if-present")
    if body.get("kind", KIND) != kind:
        raise ConfigError(
            f"{store.url} is a run of kind {body.get('kind', KIND)!r}, not {kind!r}: choose another run_id"
        )
    # Through the schema: a key that did not exist when the run was started had its default.
    parse = parse_config if isinstance(config, Config) else parse_supervised_config
    started_with = parse(body["config"], source=store.url_of("run.json")).model_dump(mode="json")
    changed = different_keys(in_newest_world(started_with, read_worlds(store)), config.model_dump(mode="json"))
    moves = is_move(changed, config)
    if changed and not (moves and may_move(store, config)):
        listed = "; ".join(f"{key}: {old!r} in the run, {new!r} now" for key, (old, new) in sorted(changed.items()))
        universal = "; only from universal checkpoints can it go on so (ds.use_universal_ckpt=true from the start)"
        raise ConfigError(
            f"{store.url} was started with another configuration ({listed}): resume with the same, or choose another run_id"
            f"{universal if moves else ''}"
        )
    return changed


def different_keys(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys with different values, without operational sections."""
    return differences(old, new, OPERATIONAL)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known of a run before its processes are started."""

    store: RunStore
    body: dict[str, Any] | None  # of run.json; None if the run is new
    models: dict[str, PinnedModel]
    tracker: Tracker
    resources: dict[str, float]  # of the cluster
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
        ConfigError: the run's log and the request do not fit, or a model cannot be found.
        WorkerError: there is no such cluster.
    """
    store = open_store(config, run_id)
    await asyncio.to_thread(store.objects.probe)
    await earlier_attempt_over(store, flow_run_id)
    body = await asyncio.to_thread(store.read_run)
    changed = await asyncio.to_thread(check_resume, body, config, store, resume, flow_run_id, kind)
    pinned = await asyncio.to_thread(pin_models, models, config.storage, (body or {}).get("models"))
    tracker = await asyncio.to_thread(
        make_tracker, tracking_uri(config), config.logger.mlflow_experiment, config.logger.mlflow_model
    )
    resources = await asyncio.to_thread(connect, config.run.ray_address)
    code = await asyncio.to_thread(user_code, config.model_dump(mode="json"))
    _warn_of_changed_code(store, body, code)
    worlds = await asyncio.to_thread(read_worlds, store)
    threads = worlds[-1].cpu_threads if worlds else (body or {}).get("cpu_threads")
    return Prepared(
        store, body, pinned, tracker, resources, code, bool(changed), None if ranks_change(changed) else threads
    )


async def _open(config: Config, run_id: str, resume: Resume, flow_run_id: str | None) -> OpenRun:
    known = await prepare(config, run_id, resume, flow_run_id, models_of(config))
    replay, source = await asyncio.to_thread(_replay, known, config)
    placement = place(config, known.resources)
    owner = LeaseOwner.of_this_process(flow_run_id or "")
    lease = await asyncio.to_thread(acquire, known.store, owner, config.run.lease_seconds)
    context = WorkerContext(
        run_id=run_id,
        config=config,
        device=placement.device,
        workdir=str(Path.cwd()),
        model_cache=model_cache(),
        models=known.models,
    )
    threads = fixed_threads(known, config, placement.counts["policy"] + placement.counts["critic"])
    session = RunSession(context, ActorGroups(context, run_members(config, placement, threads)), lease)
    plan: RunPlan | None = None

    async def plan_steps(facts: DataFacts | None) -> PlannedSteps:
        nonlocal plan
        plan = _plan(known, config, facts, replay, source)
        document = run_document(config, run_id, plan, flow_run_id)
        if replay is not None:
            document["replay"] = replay.to_json()
        await fix_plan(known, {**document, "cpu_threads": threads}, plan, "data.prompt_dataset")
        return PlannedSteps(plan.total_steps, plan.critic_steps)

    await start_processes(known, session, config, threads, lambda: session.open(plan_steps))
    assert plan is not None, "session.open asks for the plan"
    return OpenRun(run_id, config, known.store, session, plan, known.tracker, replay=replay, user_code=known.user_code)


def _replay(known: Prepared, config: Config) -> tuple[Replay | None, dict[str, Any]]:
    """What a replay trains on, as recorded when it first started, and the run.json of its source while it is new."""
    if not config.is_replay:
        return None, {}
    if known.body is None:
        return new_replay(config, known.store.run_id)
    return Replay.from_json(known.body["replay"], source_store(config, known.store.run_id)), {}


def _plan(
    known: Prepared, config: Config, facts: DataFacts | None, replay: Replay | None, source: dict[str, Any]
) -> RunPlan:
    """By the prompts as they are now; of a replay, by those of its source when it first started."""
    if replay is None:
        assert facts is not None, "a run that samples has prompts"
        return make_plan(config, facts)
    if known.body is not None:
        return RunPlan(**known.body["plan"])
    return make_plan(config, facts_of(source), slice(replay.first, replay.last + 1))


def _warn_of_changed_code(store: RunStore, body: dict[str, Any] | None, code: dict[str, str]) -> None:
    """A mended reward file is welcome; that the run was not made by one code alone stands in its manifests."""
    changed = changed_code(body["user_code"], code) if body is not None and "user_code" in body else []
    if changed:
        logger.warning("%s goes on with other code than it was started with: %s", store.url, "; ".join(changed))


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


def fixed_threads(known: Prepared, config: Config | SupervisedConfig, learning: int) -> int:
    """CPU threads of each of ``learning`` training ranks. Sums of floats depend on them: a resumed run keeps its own."""
    return int(known.cpu_threads or config.run.cpu_threads or max(1, cores() // learning))


def tracking_uri(config: Config | SupervisedConfig) -> str | None:
    """Where MLflow is; None: nowhere."""
    return config.logger.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI")


def model_cache() -> str:
    """Folder of built-in models and fetched checkpoints, the same for every worker of this machine."""
    return str(Path(os.environ.get("RLHF_HOME", ".rlhf")).absolute() / "models")


def make_plan(config: Config, facts: DataFacts, replayed: slice = slice(None)) -> RunPlan:
    """Iterations and optimizer steps of the whole run.

    Batches do not cross epochs: the last one of each is short where the prompts do not divide. Samples that fail may
    make the run a few steps shorter than planned; filtering may end it many iterations earlier, never later.

    Args:
        config: the run's.
        facts: of its prompts.
        replayed: the iterations of it that a replay trains on.

    Raises:
        ConfigError: only the critic would learn.
    """
    rollout, train = config.rollout, config.train
    batches = [min(rollout.batch_size, facts.prompts - drawn) for drawn in range(0, facts.prompts, rollout.batch_size)]
    iterations = (batches * train.num_episodes)[: train.max_iterations][replayed]  # prompts of each
    samples = [prompts * rollout.n_samples_per_prompt for prompts in iterations]
    steps = [math.ceil(count / config.samples_per_step) * train.max_epochs for count in samples]
    frozen = config.critic.freezing_steps if config.needs_critic else 0
    if frozen and frozen >= len(iterations):
        raise ConfigError(
            f"critic.freezing_steps={frozen} leaves none of the run's {len(iterations)} iterations to the policy: lower it, or "
            "give more prompts"
        )
    return RunPlan(
        prompts=facts.prompts,
        dropped=facts.dropped,
        fingerprint=facts.fingerprint,
        iterations=len(iterations),
        total_steps=sum(steps[frozen:]),
        critic_steps=sum(steps) if config.needs_critic else 0,
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
