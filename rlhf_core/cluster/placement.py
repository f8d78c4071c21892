"""What each worker of a run asks of Ray, checked against the cluster before anything starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_core.config.rules import misfits, training_misfits
from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rlhf_core.config import Config, SupervisedConfig
    from rlhf_core.config.model import RunConfig
    from rlhf_core.generation.settings import Device

# Share of a CPU that the light workers (rollout, scoring) reserve: they wait most of the time.
LIGHT_CPUS = 0.1
LIGHT_WORKERS = ("rollout", "scoring")


@dataclass(frozen=True, slots=True)
class Share:
    """Resources of one process."""

    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True)
class Placement:
    """Who gets what."""

    device: Device
    engine: Share
    rank: Share  # of a process that holds a model besides the engines
    light: Share
    counts: Mapping[str, int]  # processes by role, models besides the engines; 0: there is no such model

    def describe(self, config: Config) -> list[str]:
        """One line a group, for people."""
        rows = [("engine", engines_of(config), self.engine)]
        rows += [(role, count, self.rank) for role, count in self.counts.items()]
        rows += [(name, 0 if config.is_replay and name == "rollout" else 1, self.light) for name in LIGHT_WORKERS]
        return [f"{name:<10} {count} × {share.cpus:g} CPU, {share.gpus:g} GPU" for name, count, share in rows if count]


def resolve_device(run: RunConfig, resources: Mapping[str, float]) -> Device:
    """``cpu`` or ``gpu``, from the configuration and what the cluster has."""
    if run.device != "auto":
        return run.device
    return "gpu" if resources.get("GPU", 0) > 0 else "cpu"


def place(config: Config, resources: Mapping[str, float]) -> Placement:
    """Shares for every group of a run by rewards.

    On GPUs each engine takes ``tensor_parallel_size`` and each rank of another model one. Processes share the cores: their
    shares of CPUs only have to add up, so that Ray never waits for one that is not there.

    Raises:
        ConfigError: the cluster has too few GPUs, with the sum that did not fit; or a setting does not exist on its kind.
    """
    device = resolve_device(config.run, resources)
    _refuse(misfits(config, device))
    tensor_parallel = config.vllm.tensor_parallel_size
    counts = model_ranks(config)
    processes = engines_of(config) * tensor_parallel + sum(counts.values())
    listed = " + ".join(f"{count} {role}" for role, count in counts.items() if count)
    _check_gpus(
        device,
        processes,
        f"ranks: {listed}"
        if config.is_replay
        else f"vllm.num_engines={config.vllm.num_engines} × vllm.tensor_parallel_size={tensor_parallel} + ranks: {listed}",
        resources,
    )
    each = _cpus_each(resources.get("CPU", 1) - len(LIGHT_WORKERS) * LIGHT_CPUS, processes)
    gpus = 1 if device == "gpu" else 0
    engine = Share(each * tensor_parallel, gpus * tensor_parallel)
    return Placement(device, engine, Share(each, gpus), Share(LIGHT_CPUS, 0), counts)


def place_supervised(config: SupervisedConfig, resources: Mapping[str, float]) -> tuple[Device, Share]:
    """The device of a supervised run, and the share of each rank; errors as ``place``."""
    device = resolve_device(config.run, resources)
    _refuse(training_misfits(config, device))
    ranks = config.model.world_size
    _check_gpus(device, ranks, "model.num_nodes × model.num_gpus_per_node", resources)
    return device, Share(_cpus_each(resources.get("CPU", 1), ranks), 1 if device == "gpu" else 0)


def engines_of(config: Config) -> int:
    """Engines of a run; a replay has none."""
    return 0 if config.is_replay else config.vllm.num_engines


def model_ranks(config: Config) -> dict[str, int]:
    """Processes of each model besides the engines, by role."""
    ref, critic = config.ref, config.critic
    return {
        "policy": config.actor.world_size,
        "critic": critic.world_size if config.needs_critic else 0,
        "reference": ref.num_nodes * ref.num_gpus_per_node if config.needs_reference else 0,
        "reward": config.reward.model_num_ranks
        if config.scores and config.reward.model_name_or_path is not None
        else 0,
    }


def _refuse(problems: Iterable[str]) -> None:
    found = list(problems)
    if found:
        raise ConfigError("\n".join(found))


def _check_gpus(device: Device, processes: int, sum_of: str, resources: Mapping[str, float]) -> None:
    have = resources.get("GPU", 0)
    if device == "gpu" and processes > have:
        raise ConfigError(
            f"the run needs {processes} GPUs ({sum_of}), the cluster has {have:g}: lower one of them or add nodes"
        )


def _cpus_each(cpus: float, processes: int) -> float:
    return math.floor(1000 * min(1.0, max(cpus, 0.0) / processes)) / 1000
