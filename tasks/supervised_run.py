"""Opening and closing a supervised run, as ``run`` does for a run by rewards."""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.cluster.context import SupervisedContext
from rlhf_core.cluster.placement import place_supervised
from rlhf_core.cluster.supervised_session import SupervisedSession
from rlhf_core.cluster.supervised_worker import ExampleFacts, steps_per_epoch
from rlhf_core.config import Method, SupervisedConfig, load_supervised_config, parse_supervised_config
from rlhf_core.data import supervised_models_of
from rlhf_core.storage import LeaseOwner, RunStore, acquire
from rlhf_core.storage.exports.output import exports_among
from rlhf_core.telemetry import log_format
from tasks.opening import fix_plan, fixed_threads, model_cache, prepare, run_document, start_processes
from tasks.run import current_any_run, working_on
from tasks.secrets import loaded_secrets
from tasks.telling import Telling, tellings_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from rlhf_core.lineage import Tracker
    from tasks.resume import Resume


@dataclass(frozen=True, slots=True)
class SupervisedPlan:
    """What the whole run will do; fixed when it first starts."""

    examples: int
    dropped: int
    held_out: int
    fingerprint: str
    iterations: int
    total_steps: int


@dataclass(slots=True)
class OpenSupervisedRun:
    """A run of SFT, reward-model training or DPO that this process works on."""

    run_id: str
    method: Method
    config: SupervisedConfig
    store: RunStore
    session: SupervisedSession
    plan: SupervisedPlan
    tracker: Tracker
    metric_trackers: Sequence[Tracker] = ()  # beside it
    user_code: dict[str, str] = field(
        default_factory=dict
    )  # the user's Python files, as this attempt loads them -> sha256
    tellings: list[Telling] = field(init=False)

    def __post_init__(self) -> None:
        self.tellings = tellings_of(self.tracker, self.metric_trackers)


def current_supervised_run(run_id: str) -> OpenSupervisedRun:
    """The open supervised run."""
    run = current_any_run(run_id)
    assert isinstance(run, OpenSupervisedRun), "tasks are called for runs of their kind"
    return run


def resolve_supervised_config(config: str | dict[str, Any], overrides: Sequence[str]) -> SupervisedConfig:
    """The checked configuration of a flow's parameters: a file's name, or the mapping itself."""
    if isinstance(config, str):
        return load_supervised_config(config, overrides)
    return parse_supervised_config(config, overrides)


@asynccontextmanager
async def opened_supervised(
    method: Method, config: SupervisedConfig, run_id: str, resume: Resume, flow_run_id: str | None
) -> AsyncIterator[OpenSupervisedRun]:
    """The run, with all its processes. Arguments and errors as ``run.opened``."""
    async with working_on(await _open(method, config, run_id, resume, flow_run_id)) as run:
        yield run


def steps_of(run: OpenSupervisedRun, iteration: int) -> tuple[int, int]:
    """(first optimizer step, number of steps) of an iteration."""
    size = run.config.train.steps_per_iteration
    first = iteration * size
    return first, min(size, run.plan.total_steps - first)


def make_supervised_plan(config: SupervisedConfig, facts: ExampleFacts) -> SupervisedPlan:
    """Iterations and optimizer steps of the whole run. Steps do not cross epochs: the last of each may be short."""
    train = config.train
    steps = steps_per_epoch(facts.examples, train.batch_size) * train.max_epochs
    steps = steps if train.max_steps is None else min(steps, train.max_steps)
    return SupervisedPlan(
        examples=facts.examples,
        dropped=facts.dropped,
        held_out=facts.held_out,
        fingerprint=facts.fingerprint,
        iterations=math.ceil(steps / train.steps_per_iteration),
        total_steps=steps,
    )


async def _open(
    method: Method, config: SupervisedConfig, run_id: str, resume: Resume, flow_run_id: str | None
) -> OpenSupervisedRun:
    known = await prepare(config, run_id, resume, flow_run_id, supervised_models_of(config, method), method)
    placement = place_supervised(config, known.nodes)
    owner = LeaseOwner.of_this_process(flow_run_id or "")
    lease = await asyncio.to_thread(acquire, known.store, owner, config.run.lease_seconds)
    context = SupervisedContext(
        run_id=run_id,
        config=config,
        device=placement.device,
        workdir=str(Path.cwd()),
        model_cache=model_cache(),
        models=known.models,
        secrets=loaded_secrets(config.run.secrets),
        log_format=log_format(config.logger.log_format),
        method=method,
    )
    threads = fixed_threads(known, config, config.model.world_size)
    session = SupervisedSession(context, placement, threads, lease)
    plan: SupervisedPlan | None = None

    async def plan_steps(facts: ExampleFacts) -> int:
        nonlocal plan
        plan = make_supervised_plan(config, facts)
        exports = await asyncio.to_thread(exports_among, config.data.dataset)
        document = run_document(config, run_id, plan, flow_run_id, method)
        if exports:
            document["exports"] = exports
        await fix_plan(known, {**document, "cpu_threads": threads}, plan, "data.dataset")
        return plan.total_steps

    await start_processes(known, session, config, threads, lambda: session.open(plan_steps))
    assert plan is not None, "session.open asks for the plan"
    return OpenSupervisedRun(
        run_id,
        method,
        config,
        known.store,
        session,
        plan,
        known.tracker,
        known.metric_trackers,
        user_code=known.user_code,
    )
