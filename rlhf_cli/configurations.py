"""What a file configures: a run by rewards, a supervised run, a chain of both, or a retraining."""

from __future__ import annotations

import asyncio
import os
from importlib.util import find_spec
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
    from collections.abc import Iterator, Sequence

    from rlhf_core.cluster.placement import Node
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


def asked_for(config: Config | SupervisedConfig, nodes: Sequence[Node]) -> tuple[str, list[str]]:
    """What a run asks of a cluster.

    Returns:
        (device, lines: the placement of its processes, and what plays its episodes).

    Raises:
        ConfigError: it cannot work there, or its algorithms or reward functions cannot be loaded.
    """
    from rlhf_cli.pipelines import in_words
    from rlhf_cli.slot_table import slot_table
    from rlhf_core.agents.loading import name_of_agent
    from rlhf_core.algorithms.check import check_algorithms
    from rlhf_core.cluster.placement import LIGHT_WORKERS, place, place_supervised
    from rlhf_core.rewards import check_reward_config

    if isinstance(config, SupervisedConfig):
        ranks = place_supervised(config, nodes)
        return ranks.device, slot_table(ranks)
    check_algorithms(config)
    if config.has_reward_source:  # else the agent rewards
        check_reward_config(config.reward)
    placement = place(config, nodes)
    light = [worker for worker in LIGHT_WORKERS if not (config.is_replay and worker == "rollout")]
    played = [] if config.is_replay else [f"{'played by':<10} {asyncio.run(name_of_agent(config))}"]
    return placement.device, [*slot_table(placement, light), *played, f"{'pipeline':<10} {in_words(config)}"]


def cluster_of(
    config: Config | SupervisedConfig, nodes: int | None, cpus: float | None, gpus: float | None
) -> tuple[str, list[Node]]:
    """The cluster that a placement is drawn for.

    Args:
        config: of the run.
        nodes: of the cluster that the user describes; None, as all of them: the one of ``run.ray_address`` or $RAY_ADDRESS,
            else this machine.
        cpus: of each node.
        gpus: of each node.

    Returns:
        (what it is called, its nodes).

    Raises:
        WorkerError: the cluster that is named does not answer.
    """
    from rlhf_core.cluster.connect import connect, disconnect
    from rlhf_core.cluster.placement import Node

    address = config.run.ray_address or os.environ.get("RAY_ADDRESS")
    described = (nodes, cpus, gpus) != (None, None, None)
    if address and not described:
        try:
            return f"the cluster at {address}", connect(address)
        finally:
            disconnect()
    each_cpus = len(os.sched_getaffinity(0)) if cpus is None else cpus
    each_gpus = gpus_of_this_machine() if gpus is None else gpus
    listed = [Node(f"node {number}", each_cpus, each_gpus) for number in range(1, (nodes or 1) + 1)]
    return "such a cluster" if described else "this machine", listed


def gpus_of_this_machine() -> int:
    """As torch counts them."""
    if find_spec("torch") is None:
        return 0
    import torch

    return int(torch.cuda.device_count())
