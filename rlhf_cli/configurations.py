"""What a file configures: a run by rewards, a supervised run, a chain of both, or a retraining."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from rlhf_core.config import (
    Config,
    SupervisedConfig,
    kind_of,
    load_chain_config,
    load_config,
    load_retrain_config,
    load_supervised_config,
    plan_chain,
    plan_turn,
    read_yaml,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rlhf_core.config.chain import FlowName


def load_for(flow: FlowName, config: str, overrides: Sequence[str]) -> Config | SupervisedConfig:
    """The checked configuration of a flow."""
    return load_config(config, overrides) if flow == "train" else load_supervised_config(config, overrides)


def loaded(config: str, overrides: Sequence[str]) -> Iterator[tuple[str, Config | SupervisedConfig]]:
    """What a file configures, told by its sections: one run (of a retraining: what a turn trains), under no name, or the runs
    of a chain, by their stages."""
    kind = kind_of(read_yaml(config))
    if kind == "chain":
        yield from ((run.name, run.config) for run in plan_chain(load_chain_config(config, overrides), "CHAIN"))
    elif kind == "retrain":
        yield "", plan_turn(load_retrain_config(config, overrides))
    else:
        yield "", load_for("train" if kind == "rewards" else "sft", config, overrides)


def tree_of(config: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The whole of a file, defaults included: sections; of a chain by stage; of a retraining with ``config`` in full."""
    trees = {name: checked.model_dump(mode="json") for name, checked in loaded(config, overrides)}
    if kind_of(read_yaml(config)) == "retrain":
        return {**load_retrain_config(config, overrides).model_dump(mode="json"), "config": trees[""], "overrides": []}
    return trees.get("", trees)


def asked_for(config: Config | SupervisedConfig, resources: Mapping[str, float]) -> tuple[str, list[str]]:
    """What a run asks of a cluster.

    Returns:
        (device, a line for each group of processes).

    Raises:
        ConfigError: it cannot work there, or its algorithms or reward functions cannot be loaded.
    """
    from rlhf_core.agents.loading import name_of_agent
    from rlhf_core.algorithms.check import check_algorithms
    from rlhf_core.cluster.placement import place, place_supervised
    from rlhf_core.rewards import check_reward_config

    if isinstance(config, SupervisedConfig):
        device, share = place_supervised(config, resources)
        return device, [f"{'model':<10} {config.model.world_size} × {share.cpus:g} CPU, {share.gpus:g} GPU"]
    check_algorithms(config)
    if config.has_reward_source:  # else the agent rewards
        check_reward_config(config.reward)
    placement = place(config, resources)
    played = [] if config.is_replay else [f"{'played by':<10} {asyncio.run(name_of_agent(config))}"]
    return placement.device, [*placement.describe(config), *played]
