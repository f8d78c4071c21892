"""What each worker of a run asks of Ray, checked against the cluster before anything starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_core.config.rules import misfits
from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlhf_core.config import Config
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
    policy: Share
    reference: Share
    light: Share

    def describe(self, config: Config) -> list[str]:
        """One line a group, for people."""
        rows = [("engine", config.vllm.num_engines, self.engine), ("policy", config.actor.world_size, self.policy)]
        if config.needs_reference:
            rows.append(("reference", reference_ranks(config), self.reference))
        rows += [(name, 1, self.light) for name in LIGHT_WORKERS]
        return [f"{name:<10} {count} × {share.cpus:g} CPU, {share.gpus:g} GPU" for name, count, share in rows]


def resolve_device(config: Config, resources: Mapping[str, float]) -> Device:
    """``cpu`` or ``gpu``, from the configuration and what the cluster has."""
    if config.run.device != "auto":
        return config.run.device
    return "gpu" if resources.get("GPU", 0) > 0 else "cpu"


def place(config: Config, resources: Mapping[str, float]) -> Placement:
    """Shares for every group.

    On GPUs each engine takes ``tensor_parallel_size`` and each training rank one. Processes share the cores: their
    shares of CPUs only have to add up, so that Ray never waits for one that is not there.

    Raises:
        ConfigError: the cluster has too few GPUs, with the sum that did not fit; or a setting does not exist on its kind.
    """
    device = resolve_device(config, resources)
    problems = list(misfits(config, device))
    if problems:
        raise ConfigError("\n".join(problems))
    tensor_parallel = config.vllm.tensor_parallel_size
    ranks = config.actor.world_size + (reference_ranks(config) if config.needs_reference else 0)
    processes = config.vllm.num_engines * tensor_parallel + ranks
    if device == "gpu":
        have = resources.get("GPU", 0)
        if processes > have:
            raise ConfigError(
                f"the run needs {processes} GPUs (vllm.num_engines={config.vllm.num_engines} × "
                f"vllm.tensor_parallel_size={tensor_parallel} + {ranks} training ranks), the cluster has {have:g}: "
                "lower one of them or add nodes"
            )
    cpus = resources.get("CPU", 1) - len(LIGHT_WORKERS) * LIGHT_CPUS
    each = math.floor(1000 * min(1.0, max(cpus, 0.0) / processes)) / 1000
    gpus = 1 if device == "gpu" else 0
    rank = Share(each, gpus)
    return Placement(device, Share(each * tensor_parallel, gpus * tensor_parallel), rank, rank, Share(LIGHT_CPUS, 0))


def reference_ranks(config: Config) -> int:
    """Ranks of the reference model."""
    return config.ref.num_nodes * config.ref.num_gpus_per_node
