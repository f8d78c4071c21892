"""A chain of runs: what can be checked before the first, which of them are finished, and what came of them."""

from __future__ import annotations

import asyncio
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.artifacts import acreate_markdown_artifact

from rlhf_core.cluster.connect import connect
from rlhf_core.cluster.context import open_store
from rlhf_core.cluster.placement import place, place_supervised
from rlhf_core.config import ChainConfig, Config, SupervisedConfig, load_chain_config, parse_chain_config
from rlhf_core.config.model_spec import is_run_model, parse_run_model
from rlhf_core.data import models_of, pin, supervised_models_of
from rlhf_core.errors import ConfigError
from rlhf_core.lineage import ancestry, draw
from rlhf_core.rewards import check_functions
from tasks.lineage import iteration_metrics
from tasks.options import TASK_OPTIONS
from tasks.report import artifact_key
from tasks.resume import KIND, Resume, check_resume

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from rlhf_core.cluster.placement import Node
    from rlhf_core.config import ChainedRun, Method
    from rlhf_core.config.chain import FlowName
    from rlhf_core.storage import RunStore

METHODS: dict[FlowName, Method] = {"sft": "sft", "reward-model": "reward_model", "dpo": "dpo"}

# What tells whether a stage worked: on held-out examples, or else as it was trained.
HEADLINES: dict[FlowName, tuple[str, ...]] = {
    "sft": ("eval/loss", "train/loss"),
    "reward-model": ("eval/accuracy", "train/accuracy"),
    "dpo": ("eval/accuracy", "train/accuracy"),
}
# Of a run by rewards: the reward, its parts, and the reward of held-out prompts.
OF_REWARDS = re.compile(r"reward/mean|reward_log/[^/]+|eval/reward_mean|eval/score_mean")


@dataclass(frozen=True, slots=True)
class Headline:
    """A metric of the first version that has it, and of the last."""

    metric: str
    first: float
    last: float


@dataclass(frozen=True, slots=True)
class StageResult:
    """What came of a stage."""

    stage: str
    flow: FlowName
    run_id: str
    storage: str  # URL of its log
    version: int  # iterations
    optimizer_steps: int
    headlines: tuple[Headline, ...]


def resolve_chain(config: str | dict[str, Any], overrides: Sequence[str]) -> ChainConfig:
    """The chain of a flow's parameters: a file's name, or the mapping itself."""
    if isinstance(config, str):
        return load_chain_config(config, overrides)
    return parse_chain_config(config, overrides)


def check_chain(runs: Sequence[ChainedRun], resume: Resume, is_retry: bool) -> None:
    """Refuse what would only show when a later stage starts.

    Args:
        runs: of the chain, in order.
        resume: ``must``: its first run has to exist; ``never``: none of its runs may; ``if-present``: either.
        is_retry: this flow run has run before: it may go on even with ``never``.

    Raises:
        ConfigError: a run exists with another configuration, or against ``resume``; a model that no stage makes does not
            exist; the cluster is too small for a stage; an algorithm or a reward function of the user's cannot be loaded.
            The message names the stage.
        StorageError: a store does not answer.
    """
    addresses = {run.config.run.ray_address for run in runs}
    if len(addresses) > 1:
        raise ConfigError(f"the stages name several clusters, run.ray_address={addresses}: set one in common")
    left = [run for run in runs if not is_finished(run)]
    nodes = connect(runs[0].config.run.ray_address) if left else []
    problems: list[str] = []
    for index, run in enumerate(runs):
        try:
            _check_record(run, _resume_of(index, resume, is_retry))
            if run in left:
                _check_start(run, {before.run_id for before in runs[:index]}, nodes)
        except ConfigError as error:
            problems.append(f"stage {run.name}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))


def store_of(run: ChainedRun) -> RunStore:
    """The log of a stage's run."""
    return open_store(run.config, run.run_id)


def is_finished(run: ChainedRun) -> bool:
    """True if the stage's run has come to its end."""
    return store_of(run).read_end() is not None


@task(name="report chain", task_run_name="report {chain_id}", **TASK_OPTIONS)
async def report_chain(chain_id: str, runs: Sequence[ChainedRun]) -> dict[str, Any]:
    """What came of each stage, and where the last model comes from, as an artifact and as the result of the flow."""
    results = await asyncio.to_thread(lambda: [stage_result(run) for run in runs])
    lineage = await asyncio.to_thread(_lineage, runs[-1])
    await acreate_markdown_artifact(
        chain_markdown(chain_id, results, lineage),
        key=artifact_key(chain_id, "chain"),
        description=f"What came of chain {chain_id}",
    )
    return {"chain_id": chain_id, "stages": [asdict(result) for result in results], "lineage": lineage}


def stage_result(run: ChainedRun) -> StageResult:
    """By the log of the stage's run, which is finished."""
    store = store_of(run)
    newest = store.newest_update()
    steps = 0 if newest is None else int(newest[1].body["optimizer_steps"])
    version = 0 if newest is None else newest[0] + 1
    return StageResult(run.name, run.flow, run.run_id, store.url, version, steps, _headlines(run.flow, store, version))


def chain_markdown(chain_id: str, results: Sequence[StageResult], lineage: Sequence[str]) -> str:
    """The table of the stages, and the tree."""
    lines = [f"# Chain {chain_id}", "", "| stage | run | iterations | steps | metric | first | last |"]
    lines.append("|---|---|---:|---:|---|---:|---:|")
    for result in results:
        for row, headline in enumerate(result.headlines or (None,)):
            of_run = (result.stage, result.run_id, result.version, result.optimizer_steps) if row == 0 else ("",) * 4
            numbers = ("",) * 3
            if headline is not None:
                numbers = (headline.metric, f"{headline.first:.4g}", f"{headline.last:.4g}")
            lines.append(f"| {' | '.join(str(cell) for cell in (*of_run, *numbers))} |")
    return "\n".join([*lines, "", "Where the last model comes from:", "", "```", *lineage, "```", ""])


def _resume_of(index: int, resume: Resume, is_retry: bool) -> Resume:
    """Of one stage: a chain that was broken off has its first run, and may not have the others."""
    if is_retry or (resume == "must" and index):
        return "if-present"
    return resume


def _check_record(run: ChainedRun, resume: Resume) -> None:
    """The stage's run, where there is one, is the one that is asked for."""
    store = store_of(run)
    store.objects.probe()
    check_resume(store.read_run(), run.config, store, resume, None, METHODS.get(run.flow, KIND))


def _check_start(run: ChainedRun, made: Collection[str], nodes: Sequence[Node]) -> None:
    """The stage can start once the runs ``made`` before it are there."""
    config = run.config
    if store_of(run).read_run() is None:  # else it has its models recorded
        models = models_of(config) if isinstance(config, Config) else supervised_models_of(config, METHODS[run.flow])
        for spec in sorted(set(models.values())):
            if is_run_model(spec) and parse_run_model(spec).run_id not in made:
                pin(spec, config.storage)
    if isinstance(config, SupervisedConfig):
        place_supervised(config, nodes)
        return
    from rlhf_core.algorithms.check import check_algorithms  # torch, which importing the flows must not load

    place(config, nodes)
    check_algorithms(config)
    if config.has_reward_source:  # else the agent rewards
        check_functions(config.reward)  # servers need not be up before the stage starts


def _headlines(flow: FlowName, store: RunStore, version: int) -> tuple[Headline, ...]:
    if version == 0:
        return ()
    before, after = store.read_evaluation(0) or {}, store.read_evaluation(version) or {}
    first = {**iteration_metrics(store, 0), **before.get("metrics", {})}
    last = {**iteration_metrics(store, version - 1), **after.get("metrics", {})}
    known = first.keys() & last.keys()
    if flow != "train":
        return tuple(Headline(name, first[name], last[name]) for name in HEADLINES[flow] if name in known)[:1]
    found: dict[tuple[float, float], Headline] = {}
    for name in sorted(filter(OF_REWARDS.fullmatch, known), key=_order):
        found.setdefault((first[name], last[name]), Headline(name, first[name], last[name]))  # one part is the whole
    return tuple(found.values())


def _order(name: str) -> tuple[bool, bool, str]:
    """The reward, then its parts, then what was held out."""
    return name.startswith("eval/"), name != "reward/mean", name


def _lineage(run: ChainedRun) -> list[str]:
    origin = ancestry(store_of(run))
    return [] if origin is None else draw(origin)
