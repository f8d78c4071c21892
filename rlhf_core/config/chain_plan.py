"""From a chain to its runs: every configuration checked, with the models of earlier stages put in, before anything runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.config.load import apply_overrides, parse_config, parse_supervised_config, read_yaml
from rlhf_core.config.model_spec import parse_run_model
from rlhf_core.config.rules import MODELS
from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rlhf_core.config.chain import ChainConfig, FlowName, StageConfig
    from rlhf_core.config.model import Config
    from rlhf_core.config.supervised import SupervisedConfig

REFERENCE = re.compile(r"run:\{(?P<name>[^{}]*)\}(?P<which>.*)", re.DOTALL)

# Keys that name a model.
OF_REWARDS = tuple(f"{section}.model_name_or_path" for section in MODELS)
OF_EXAMPLES = ("model.model_name_or_path", "dpo.ref_model_name_or_path")
# Those that take a scoring model: only one, or either kind. The others want a language model.
ONLY_SCORING = ("reward.model_name_or_path",)
EITHER = ("critic.model_name_or_path",)


@dataclass(frozen=True, slots=True)
class ChainedRun:
    """A stage of a chain, ready to run."""

    name: str
    flow: FlowName
    run_id: str
    config: Config | SupervisedConfig  # without references: each is a run: name now


@dataclass(frozen=True, slots=True)
class Reference:
    """A model of an earlier stage."""

    key: str  # where it stands
    name: str  # of the stage
    which: str  # "", "@best", ...


def plan_chain(chain: ChainConfig, chain_id: str) -> list[ChainedRun]:
    """Every run of a chain, in order.

    Raises:
        ConfigError: with the problems of all stages, each naming its stage, key, value and remedy.
    """
    planned: dict[str, ChainedRun] = {}
    problems: list[str] = []
    for index, stage in enumerate(chain.stages):
        earlier = [before.name for before in chain.stages[:index]]
        place = f"stages.{index} ({stage.name})"
        try:
            run, references = _plan(stage, chain.common, earlier, chain_id)
        except ConfigError as error:
            problems.append(f"{place}: {error}")
            continue
        planned[stage.name] = run
        known = [(reference, planned[reference.name]) for reference in references if reference.name in planned]
        problems += [f"{place}: {problem}" for found in known for problem in _misfits(run, *found)]
    if problems:
        raise ConfigError("\n".join(problems))
    return list(planned.values())


def run_id_of(chain_id: str, stage: str) -> str:
    """Of a stage's run."""
    return f"{chain_id}-{stage}"


def _plan(
    stage: StageConfig, common: Sequence[str], earlier: Sequence[str], chain_id: str
) -> tuple[ChainedRun, list[Reference]]:
    by_rewards = stage.flow == "train"
    data = read_yaml(stage.config) if isinstance(stage.config, str) else stage.config
    tree = apply_overrides(data, [*common, *stage.overrides])
    references = list(_references(tree, OF_REWARDS if by_rewards else OF_EXAMPLES))
    unknown = [reference for reference in references if reference.name not in earlier]
    if unknown:
        listed = ", ".join(f"run:{{{name}}}" for name in earlier) or "none: it is the first"
        raise ConfigError(
            "\n".join(
                f"{found.key}='run:{{{found.name}}}{found.which}' names no earlier stage: there are {listed}"
                for found in unknown
            )
        )
    tree = apply_overrides(tree, [f"{r.key}=run:{run_id_of(chain_id, r.name)}{r.which}" for r in references])
    source = stage.config if isinstance(stage.config, str) else "config"
    parse = parse_config if by_rewards else parse_supervised_config
    return ChainedRun(stage.name, stage.flow, run_id_of(chain_id, stage.name), parse(tree, source=source)), references


def _references(tree: dict[str, Any], keys: Sequence[str]) -> Iterator[Reference]:
    for key in keys:
        *sections, name = key.split(".")
        node: Any = tree
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        value = node.get(name) if isinstance(node, dict) else None
        match = REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if match is not None:
            yield Reference(key, match["name"], match["which"])


def _misfits(run: ChainedRun, reference: Reference, source: ChainedRun) -> Iterator[str]:
    """Why the model of ``source`` cannot be used where ``reference`` stands: else it would show hours later."""
    place = f"{reference.key}='run:{{{reference.name}}}{reference.which}'"
    scores, either = source.flow == "reward-model", reference.key in EITHER or run.flow == "reward-model"
    if reference.key in ONLY_SCORING and not scores:
        yield f"{place} needs a reward model, but {source.name} is a stage of flow {source.flow}: name a reward-model stage"
    if reference.key not in ONLY_SCORING and scores and not either:
        yield f"{place} needs a language model, but {source.name} makes a reward model: name a stage of another flow"
    if source.config.storage.root != run.config.storage.root:
        yield (
            f"{place} is looked for below storage.root={run.config.storage.root}, but {source.name} writes below "
            f"{source.config.storage.root}: set storage.root in common"
        )
    if not source.config.ckpt.save_hf:
        yield f"{place}: {source.name} has ckpt.save_hf=false, so there is no model to load: set it to true there"
    if source.config.ckpt.best_metric_key is None and parse_run_model(f"run:x{reference.which}").which == "best":
        yield f"{place}: {source.name} has no ckpt.best_metric_key: set it there, or use run:{{{source.name}}}"
