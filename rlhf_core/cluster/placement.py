"""Who sits where: a pure function of the configuration and of what the cluster has, checked before anything starts.

::

    train.                    slots (each one bundle of a Ray placement group)
    ----------------------    ---------------------------------------------------------------------------------------
    (default)                 [engine-0] [engine-1] [policy-0] [policy-1] [critic-0] [reference-0] [reward-0]
    colocate_actor_ref        … [policy-0 reference-0] [policy-1 reference-1] …
    colocate_critic_reward    … [critic-0 reward-0] …
    colocate_all              [engine-0 policy-0 critic-0 reference-0 reward-0] [engine-1 policy-1 …] …

A slot is one GPU, of which each of its processes asks Ray for an equal fraction, and their shares of the cores. Fractions say
who may share a GPU; nobody measures memory by them. On CPU a slot is its cores alone. The light workers (rollout, scoring) sit
outside the slots.

An engine with ``vllm.tensor_parallel_size`` T > 1:

    of its own      one slot of T GPUs, which Ray keeps on one node
    colocated       T slots: Ray gives no process fractions of several GPUs, so the engine holds none itself, and its vLLM
                    workers are Ray actors in the engine's slots. vLLM tells them by ``VLLM_RAY_BUNDLE_INDICES``, and takes
                    bundles of one GPU only. They belong on one node, so the slots of an engine are a placement group of their
                    own (STRICT_PACK)

All other slots are one group, packed (PACK): as few nodes as hold them, so that ranks exchange gradients within a node, and
whole nodes stay free for other runs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_core.config.group_sizes import engines_of, model_ranks
from rlhf_core.config.rules import misfits, training_misfits
from rlhf_core.errors import ConfigError
from rlhf_core.generation.settings import workers_in_ray

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rlhf_core.config import Config, SupervisedConfig
    from rlhf_core.config.model import RunConfig
    from rlhf_core.generation.settings import Device

# Share of a CPU that the light workers (rollout, scoring) reserve: they wait most of the time.
LIGHT_CPUS = 0.1
LIGHT_WORKERS = ("rollout", "scoring")

SMALLEST_SHARE = 0.001  # of a CPU: a bundle without any resource is none to Ray


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster, and all that Ray may give away of it."""

    name: str
    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True)
class Share:
    """What a process asks for in a slot."""

    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True)
class Slot:
    """One bundle: whole GPUs, and the processes that share them."""

    gpus: int  # 0 on CPU; more than 1 for an engine of its own only
    shares: Mapping[str, Share]  # by the process's name, such as "policy-0"

    @property
    def cpus(self) -> float:
        """Sum of the shares, in Ray's resolution."""
        return round(sum(share.cpus for share in self.shares.values()), 4)


@dataclass(frozen=True, slots=True)
class SlotGroup:
    """One placement group of Ray."""

    slots: tuple[Slot, ...]
    on_one_node: bool = False


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a process is started, and what it asks for there."""

    group: int  # index of the slot group
    slot: int  # index in it
    share: Share
    worker_slots: tuple[int, ...] = ()  # in the group: where vLLM starts the workers of a colocated engine
    worker_gpus: float = 0  # what each of them asks for


@dataclass(frozen=True, slots=True)
class Placement:
    """The slots of a run."""

    device: Device
    counts: Mapping[str, int]  # processes by role; 0: there is no such model
    groups: tuple[SlotGroup, ...]

    def seat(self, name: str) -> Seat:
        """Of a process.

        Raises:
            KeyError: it has none.
        """
        for index, group in enumerate(self.groups):
            held = [place for place, slot in enumerate(group.slots) if name in slot.shares]
            if held:
                share = group.slots[held[0]].shares[name]
                if len(held) == 1:
                    return Seat(index, held[0], share)
                return Seat(index, held[0], Share(share.cpus, 0), tuple(held), share.gpus)
        raise KeyError(name)

    @property
    def slots(self) -> list[Slot]:
        """Of all groups."""
        return [slot for group in self.groups for slot in group.slots]


def resolve_device(run: RunConfig, nodes: Sequence[Node]) -> Device:
    """``cpu`` or ``gpu``, from the configuration and what the cluster has."""
    if run.device != "auto":
        return run.device
    return "gpu" if any(node.gpus for node in nodes) else "cpu"


def place(config: Config, nodes: Sequence[Node]) -> Placement:
    """The slots of a run by rewards.

    Processes share the cores: their shares only have to fit, node by node, so that Ray never waits for one that is not there.

    Raises:
        ConfigError: the cluster has too few GPUs, with the sum that did not fit; or a setting does not exist on its kind.
    """
    device = resolve_device(config.run, nodes)
    _refuse(misfits(config, device))
    tensor_parallel = config.vllm.tensor_parallel_size
    counts = {"engine": engines_of(config), **model_ranks(config)}
    sharing = [tuple(role for role in roles if counts[role]) for roles in _sharing(config)]
    rooms = [room for roles in sharing for room in _rooms(roles, counts, tensor_parallel, device)]
    spread = workers_in_ray(config, device)
    lots = _lots(rooms, tensor_parallel if spread else len(rooms))
    if device == "gpu":
        units = lots if spread else _lots(rooms, 1)
        _check_gpus(units, nodes, _sum_of(config, counts, sharing), f"vllm.tensor_parallel_size={tensor_parallel}")
    return Placement(device, counts, _groups(lots, spread, nodes, len(LIGHT_WORKERS) * LIGHT_CPUS))


def place_supervised(config: SupervisedConfig, nodes: Sequence[Node]) -> Placement:
    """The slots of a supervised run, one a rank; errors as ``place``."""
    device = resolve_device(config.run, nodes)
    _refuse(training_misfits(config, device))
    counts = {"model": config.model.world_size}
    rooms = list(_rooms(("model",), counts, 1, device))
    if device == "gpu":
        _check_gpus(_lots(rooms, 1), nodes, "model.num_nodes × model.num_gpus_per_node")
    return Placement(device, counts, _groups([rooms], False, nodes, 0.0))


# --- the layout -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Room:
    """A slot before the cores are shared out."""

    gpus: int
    weights: Mapping[str, int]  # of each process, in cores that it could use

    def furnished(self, each: float) -> Slot:
        """With ``each`` CPUs for a weight of one."""
        gpus = self.gpus if len(self.weights) == 1 else math.floor(10_000 / len(self.weights)) / 10_000 * self.gpus
        return Slot(self.gpus, {name: Share(round(each * weight, 4), gpus) for name, weight in self.weights.items()})


def _sharing(config: Config) -> list[tuple[str, ...]]:
    """Roles whose processes share slots, each role once."""
    train = config.train
    if train.colocate_all:
        return [("engine", "policy", "critic", "reference", "reward")]
    first = [("policy", "reference")] if train.colocate_actor_ref else [("policy",), ("reference",)]
    second = [("critic", "reward")] if train.colocate_critic_reward else [("critic",), ("reward",)]
    return [("engine",), *first, *second]


def _rooms(roles: Sequence[str], counts: Mapping[str, int], tensor_parallel: int, device: Device) -> Iterator[_Room]:
    """Of roles that share: process i of each in the i-th."""
    gpus = 1 if device == "gpu" else 0
    if tuple(roles) == ("engine",):
        for index in range(counts["engine"]):
            yield _Room(gpus * tensor_parallel, {f"engine-{index}": tensor_parallel})
        return
    for index in range(max((counts[role] for role in roles if role != "engine"), default=0)):
        weights: dict[str, int] = {}
        for role in roles:
            if role == "engine":
                engine, worker = divmod(index, tensor_parallel)
                if device == "gpu" or worker == 0:  # on CPU the engine's workers are its own child processes
                    weights[f"engine-{engine}"] = tensor_parallel if worker == 0 else 0
            elif index < counts[role]:
                weights[f"{role}-{index}"] = 1
        yield _Room(gpus, weights)


def _lots(rooms: Sequence[_Room], size: int) -> list[Sequence[_Room]]:
    """So many rooms each."""
    return [rooms[start : start + size] for start in range(0, len(rooms), size)]


def _groups(
    lots: Sequence[Sequence[_Room]], on_one_node: bool, nodes: Sequence[Node], reserved: float
) -> tuple[SlotGroup, ...]:
    """A placement group a lot. ``reserved``: CPUs that every node keeps for other processes."""
    kept = [Node(node.name, max(node.cpus - reserved, 0.0), node.gpus) for node in nodes]
    units = lots if on_one_node else [[room] for lot in lots for room in lot]
    each = _cpus_each(units, kept)
    return tuple(SlotGroup(tuple(room.furnished(each) for room in lot), on_one_node) for lot in lots)


# --- does it fit ------------------------------------------------------------------------------------------------------


def _cpus_each(units: Sequence[Sequence[_Room]], nodes: Sequence[Node]) -> float:
    """The largest share of a core, for a weight of one, with which everything fits; at most a core."""
    weight = sum(sum(room.weights.values()) for unit in units for room in unit)
    shares = {
        min(1.0, cpus / processes) for cpus in {node.cpus for node in nodes} for processes in range(1, weight + 1)
    }
    candidates = sorted({math.floor(1000 * share) / 1000 for share in shares} - {0.0}, reverse=True)
    fitting = bisect_left(candidates, True, key=lambda each: _packs(units, each, nodes))
    return candidates[fitting] if fitting < len(candidates) else SMALLEST_SHARE


def _packs(units: Sequence[Sequence[_Room]], each: float, nodes: Sequence[Node]) -> bool:
    """True if units, none of which is divided between nodes, fit: the largest first, each on the first node with room."""
    free = [[node.gpus, node.cpus] for node in nodes]
    slots = ([room.furnished(each) for room in unit] for unit in units)
    demands = ((sum(slot.gpus for slot in unit), sum(slot.cpus for slot in unit)) for unit in slots)
    for gpus, cpus in sorted(demands, reverse=True):
        for left in free:
            if gpus <= left[0] and cpus <= left[1] + 1e-6:
                left[0] -= gpus
                left[1] -= cpus
                break
        else:
            return False
    return True


def _check_gpus(units: Sequence[Sequence[_Room]], nodes: Sequence[Node], sum_of: str, widest: str = "") -> None:
    """``units``: what is not divided between nodes; ``widest``: the key that makes one of several GPUs."""
    needed, have = sum(room.gpus for unit in units for room in unit), sum(node.gpus for node in nodes)
    if needed > have:
        raise ConfigError(
            f"the run needs {needed} GPUs ({sum_of}), the cluster has {have:g}: lower one of them or add nodes"
        )
    if not _packs(units, 0.0, nodes):
        listed = ", ".join(f"{node.gpus:g}" for node in nodes if node.gpus)
        raise ConfigError(
            f"{widest}: the GPUs of an engine lie on one node, and so the {needed} GPUs of the run ({sum_of}) do not fit on "
            f"nodes with {listed}: lower it, or use other nodes"
        )


def _sum_of(config: Config, counts: Mapping[str, int], sharing: Sequence[Sequence[str]]) -> str:
    """What the number of GPUs is made of, for people."""
    ranks = [
        (max(counts[role] for role in roles if role != "engine"), roles) for roles in sharing if set(roles) - {"engine"}
    ]
    listed = "ranks: " + " + ".join(f"{count} {'/'.join(roles)}" for count, roles in ranks)
    if not counts["engine"] or config.train.colocate_all:
        return listed
    vllm = config.vllm
    return f"vllm.num_engines={vllm.num_engines} × vllm.tensor_parallel_size={vllm.tensor_parallel_size} + {listed}"


def _refuse(problems: Iterable[str]) -> None:
    found = list(problems)
    if found:
        raise ConfigError("\n".join(found))
