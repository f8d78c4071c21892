"""What each worker of a run asks of Ray, checked against the cluster before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlhf_core.config import Config

# Share of a CPU that the light workers (rollout, scoring) reserve: they wait most of the time.
LIGHT_CPUS = 0.1


@dataclass(frozen=True, slots=True)
class Share:
    """Resources of one process."""

    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True)
class Placement:
    """Who gets what."""

    device: str
    engine: Share
    policy: Share
    reference: Share
    light: Share

    def describe(self, config: Config) -> list[str]:
        """One line a group, for people."""
        rows = [("engine", config.vllm.num_engines, self.engine), ("policy", config.actor.world_size, self.policy)]
        if config.needs_reference:
            rows.append(("reference", reference_ranks(config), self.reference))
        rows += [("rollout", 1, self.light), ("scoring", 1, self.light)]
        return [f"{name:<10} {count} × {share.cpus:g} CPU, {share.gpus:g} GPU" for name, count, share in rows]


def resolve_device(config: Config, resources: Mapping[str, float]) -> str:
    """``cpu`` or ``gpu``, from the configuration and what the cluster has."""
    if config.run.device != "auto":
        return config.run.device
    return "gpu" if resources.get("GPU", 0) > 0 else "cpu"


def place(config: Config, resources: Mapping[str, float]) -> Placement:
    """Shares for every group.

    On GPUs each engine takes ``tensor_parallel_size`` and each training rank one. On CPU processes share the cores:
    the shares only have to add up.

    Raises:
        ConfigError: the cluster is too small, with the sum that did not fit.
    """
    device = resolve_device(config, resources)
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
        rank = Share(cpus=1, gpus=1)
        return Placement(device, Share(1, tensor_parallel), rank, rank, Share(LIGHT_CPUS, 0))
    cpus = resources.get("CPU", 1) - 3 * LIGHT_CPUS
    each = round(min(1.0, max(cpus, 0.1) / processes) - 0.0005, 3)
    return Placement(device, Share(each * tensor_parallel, 0), Share(each, 0), Share(each, 0), Share(LIGHT_CPUS, 0))


def reference_ranks(config: Config) -> int:
    """Ranks of the reference model."""
    return config.ref.num_nodes * config.ref.num_gpus_per_node
