"""Opening and closing a supervised run, as ``run`` does for a run by rewards."""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rlhf_core.cluster.context import SupervisedContext
from rlhf_core.cluster.placement import place_supervised
from rlhf_core.cluster.session import cores
from rlhf_core.cluster.supervised_session import SupervisedSession
from rlhf_core.cluster.supervised_worker import ExampleFacts, steps_per_epoch
from rlhf_core.config import Method, SupervisedConfig, load_supervised_config, parse_supervised_config
from rlhf_core.data import supervised_models_of
from rlhf_core.errors import ConfigError
from rlhf_core.storage import LeaseOwner, RunStore, acquire
from tasks.best import is_best, is_saved
from tasks.run import (
    OpenRun,
    Resume,
    current_run,
    different_keys,
    is_open,
    model_cache,
    prepare,
    run_document,
    start_processes,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from rlhf_core.lineage import Tracker


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
    tracked: bool = False  # the tracker knows the run


AnyRun: TypeAlias = OpenRun | OpenSupervisedRun

_OPEN: dict[str, OpenSupervisedRun] = {}


def current_supervised_run(run_id: str) -> OpenSupervisedRun:
    """The open run; tasks look it up instead of carrying it."""
    return _OPEN[run_id]


def current_any_run(run_id: str) -> AnyRun:
    """The open run, of whatever kind."""
    return current_run(run_id) if is_open(run_id) else _OPEN[run_id]


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
    run = await _open(method, config, run_id, resume, flow_run_id)
    _OPEN[run_id] = run
    succeeded = False
    try:
        yield run
        succeeded = True
    finally:
        del _OPEN[run_id]
        await run.session.close(keep_actors=not succeeded)


def steps_of(run: OpenSupervisedRun, iteration: int) -> tuple[int, int]:
    """(first optimizer step, number of steps) of an iteration."""
    size = run.config.train.steps_per_iteration
    first = iteration * size
    return first, min(size, run.plan.total_steps - first)


def supervised_iterations_to_do(run: OpenSupervisedRun) -> list[int]:
    """What is left, by the log: an iteration is done when its update, and what was due after it, are recorded."""
    newest = run.store.newest_update()
    if newest is None:
        return list(range(run.plan.iterations))
    version = newest[0] + 1
    evaluated = not supervised_evaluation_due(run, version) or run.store.read_evaluation(version) is not None
    saved = not supervised_checkpoint_due(run, version) or is_saved(run, version)
    return list(range(version if evaluated and saved else newest[0], run.plan.iterations))


def supervised_checkpoint_due(run: OpenSupervisedRun, version: int) -> bool:
    """True if this version is to be saved: every ``ckpt.save_steps``, the last, and the best. Ask after its evaluation."""
    every = run.config.ckpt.save_steps
    return version == run.plan.iterations or (every > 0 and version % every == 0) or is_best(run, version)


def supervised_evaluation_due(run: OpenSupervisedRun, version: int) -> bool:
    """True if this version is to be evaluated: the first, the last, and every ``eval.steps``."""
    evaluation = run.config.eval
    if not evaluation.dataset:
        return False
    return version in (0, run.plan.iterations) or (evaluation.steps > 0 and version % evaluation.steps == 0)


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
    store, body, models = known.store, known.body, known.models
    device, share = place_supervised(config, known.resources)
    lease = await asyncio.to_thread(acquire, store, LeaseOwner.of_this_process(), config.run.lease_seconds)
    context = SupervisedContext(run_id, config, device, str(Path.cwd()), model_cache(), models, method)
    # Sums of floats depend on the number of threads: a resumed run keeps that of its start.
    threads = (body or {}).get("cpu_threads") or config.run.cpu_threads or max(1, cores() // config.model.world_size)
    session = SupervisedSession(context, share, threads, lease)
    plan: SupervisedPlan | None = None

    async def plan_steps(facts: ExampleFacts) -> int:
        nonlocal plan, body
        plan = make_supervised_plan(config, facts)
        if body is None:
            recorded = {role: model.to_json() for role, model in models.items()}
            document = run_document(config, run_id, plan, flow_run_id, method)
            body = {**document, "cpu_threads": threads, "models": recorded}
            await asyncio.to_thread(store.write_run, body)
        elif body["plan"] != asdict(plan):
            raise ConfigError(
                f"{store.url}: the examples are not those the run was started with "
                f"({different_keys(body['plan'], asdict(plan))}): restore data.dataset, or choose another run_id"
            )
        return plan.total_steps

    try:
        if body is None:  # actors of an attempt that died before it was recorded may hold what the names meant then
            await session.discard_actors()
        await start_processes(lambda: session.open(plan_steps), session.discard_actors, config.run.max_restarts)
    except BaseException:
        await session.close(keep_actors=False)
        raise
    assert plan is not None, "session.open asks for the plan"
    return OpenSupervisedRun(run_id, method, config, store, session, plan, known.tracker)
