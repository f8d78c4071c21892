"""Opening and closing a run: what the configuration, the log and the cluster say must fit together before anything is done.

Several flows of one process (a run and its iterations) share the run's open session; a retried iteration opens its own.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from rlhf_core.cluster.context import WorkerContext
from rlhf_core.cluster.groups import ActorGroups, run_members
from rlhf_core.cluster.placement import place
from rlhf_core.cluster.replay import Replay, facts_of, new_replay, source_store
from rlhf_core.cluster.session import PlannedSteps, RunSession
from rlhf_core.config import Config, load_config, parse_config
from rlhf_core.data import models_of
from rlhf_core.storage import LeaseOwner, RunStore, acquire
from rlhf_core.telemetry import log_format
from tasks.attempts import recorded_attempt
from tasks.opening import fix_plan, fixed_threads, model_cache, prepare, run_document, start_processes
from tasks.order import StepOrder
from tasks.plan import RunPlan, make_plan
from tasks.resume import stored_config
from tasks.secrets import load_secrets, loaded_secrets
from tasks.telling import Telling, tellings_of
from tasks.watch import watched

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from rlhf_core.cluster.rollout_worker import DataFacts
    from rlhf_core.lineage import Tracker
    from tasks.opening import Prepared
    from tasks.resume import Resume
    from tasks.supervised_run import OpenSupervisedRun

    AnyRun: TypeAlias = "OpenRun | OpenSupervisedRun"

Run = TypeVar("Run", bound="AnyRun")


@dataclass(slots=True)
class OpenRun:
    """A run that this process works on."""

    run_id: str
    config: Config
    store: RunStore
    session: RunSession
    plan: RunPlan
    tracker: Tracker
    metric_trackers: Sequence[Tracker] = ()  # beside it
    replay: Replay | None = None  # where its trajectories come from, if it samples none
    user_code: dict[str, str] = field(
        default_factory=dict
    )  # the user's Python files, as this attempt loads them -> sha256
    order: StepOrder = field(init=False)  # of the steps of iterations that overlap
    tellings: list[Telling] = field(init=False)

    def __post_init__(self) -> None:
        self.order = StepOrder(self.config)
        self.tellings = tellings_of(self.tracker, self.metric_trackers)


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
        async with recorded_attempt(run.store, run.session), watched(run):
            yield run
        succeeded = True
    finally:
        del _OPEN[run.run_id]
        for telling in run.tellings:
            await telling.close()
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
async def open_stored(
    run_id: str, root: str, options: dict[str, Any], secrets: dict[str, str] | None = None
) -> AsyncIterator[OpenRun]:
    """A run that exists already, with the configuration it was started with, wherever its log lies by now.

    ``secrets``: its ``run.secrets``, which may be needed to read the log.
    """
    if run_id in _OPEN:
        yield current_run(run_id)
        return
    await load_secrets(secrets or {})
    config = await asyncio.to_thread(stored_config, RunStore(run_id, root, options))
    found_at = config.storage.model_copy(update={"root": root, "options": options})
    async with opened(config.model_copy(update={"storage": found_at}), run_id, "must") as run:
        yield run


def resolve_config(config: str | dict[str, Any], overrides: Sequence[str]) -> Config:
    """The checked configuration of a flow's parameters: a file's name, or the mapping itself."""
    return load_config(config, overrides) if isinstance(config, str) else parse_config(config, overrides)


def default_run_id(flow_run_name: str, flow_run_id: str) -> str:
    """Readable, unique, fit to name a folder, and the same when the flow run is retried."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", flow_run_name)[:100]
    return f"{readable}-{flow_run_id[:8]}"


async def _open(config: Config, run_id: str, resume: Resume, flow_run_id: str | None) -> OpenRun:
    known = await prepare(config, run_id, resume, flow_run_id, models_of(config))
    replay, source = await asyncio.to_thread(_replay, known, config)
    placement = place(config, known.nodes)
    owner = LeaseOwner.of_this_process(flow_run_id or "")
    lease = await asyncio.to_thread(acquire, known.store, owner, config.run.lease_seconds)
    context = WorkerContext(
        run_id=run_id,
        config=config,
        device=placement.device,
        workdir=str(Path.cwd()),
        model_cache=model_cache(),
        models=known.models,
        secrets=loaded_secrets(config.run.secrets),
        log_format=log_format(config.logger.log_format),
    )
    threads = fixed_threads(known, config, placement.counts["policy"] + placement.counts["critic"])
    session = RunSession(context, ActorGroups(context, run_members(config, placement, threads), placement), lease)
    plan: RunPlan | None = None

    async def plan_steps(facts: DataFacts | None) -> PlannedSteps:
        nonlocal plan
        plan = _plan(known, config, facts, replay, source)
        document = run_document(config, run_id, plan, flow_run_id)
        if replay is not None:
            document["replay"] = replay.to_json()
        vision = source.get("vision") if facts is None else facts.vision
        if vision is not None:  # the ranks and every later start compare theirs with it
            document["vision"] = vision
        await fix_plan(known, {**document, "cpu_threads": threads}, plan, "data.prompt_dataset")
        return PlannedSteps(plan.total_steps, plan.critic_steps)

    await start_processes(known, session, config, threads, lambda: session.open(plan_steps))
    assert plan is not None, "session.open asks for the plan"
    return OpenRun(
        run_id,
        config,
        known.store,
        session,
        plan,
        known.tracker,
        known.metric_trackers,
        replay=replay,
        user_code=known.user_code,
    )


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
