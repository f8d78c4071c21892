"""A look at the processes of a run while they work: asked of those that answer at once, and of the nodes they are on.

::

    Observer.look ─▶ engines, rollout worker   their own numbers: async actors, they answer beside their work
                  ─▶ NodeObserver, one a node  resident memory of the processes there, GPUs, the object store

A training rank answers one call at a time, and its numbers must not wait for an update: so its memory is read from outside, by
its process id, which it is asked for once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlhf_core.cluster.wait import CLUSTER_GONE, one
from rlhf_core.errors import RlhfError
from rlhf_core.telemetry import get_logger
from rlhf_core.telemetry.machine import Gpu, gpus, resident_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlhf_core.cluster.groups import ActorGroups
    from rlhf_core.generation.load import EngineLoad

logger = get_logger(__name__)

ANSWER_SECONDS = 4.0  # one that takes longer is left out of this look


@dataclass(frozen=True, slots=True)
class NodeSight:
    """One node."""

    resident: dict[str, int]  # process -> bytes
    gpus: list[Gpu]
    store_used: int | None  # bytes of Ray's object store; None: it did not say
    store_capacity: int | None


@dataclass(frozen=True, slots=True)
class Sight:
    """All that was seen; who did not answer is left out."""

    engines: dict[str, EngineLoad] = field(default_factory=dict)
    groups_in_flight: int | None = None
    nodes: dict[str, NodeSight] = field(default_factory=dict)  # by address


class NodeObserver:
    """Ray actor: looks at the node it is on."""

    def __init__(self, address: str, port: int) -> None:
        self._raylet = (address, port)

    def look(self, pids: Mapping[str, int]) -> NodeSight:
        """The processes with these ids, by name, and the node."""
        resident = {name: resident_bytes(pid) for name, pid in pids.items()}
        used, capacity = _object_store(*self._raylet)
        return NodeSight({name: held for name, held in resident.items() if held is not None}, gpus(), used, capacity)


class Observer:
    """Looks at one run. Use from one event loop; ``close`` it.

    Args:
        groups: the run's actors.
    """

    def __init__(self, groups: ActorGroups) -> None:
        self._groups = groups
        self._nodes: dict[str, tuple[str, Any]] = {}  # Ray's id -> address, observer
        self._processes: dict[Any, tuple[str, str, int]] = {}  # actor's id -> name, node's id, process id
        self._asked: dict[Any, asyncio.Task[None]] = {}

    async def look(self) -> Sight:
        """One look; takes up to ``ANSWER_SECONDS``, and disturbs nobody."""
        living, nodes = await asyncio.to_thread(self._living)
        self._meet(living)
        pids: dict[str, dict[str, int]] = {node: {} for node in nodes}
        for handle in living.values():
            if (known := self._processes.get(handle._actor_id)) is not None and known[1] in pids:
                pids[known[1]][known[0]] = known[2]
        pids[ray.get_runtime_context().get_node_id()]["controller"] = os.getpid()
        engines = {name: handle for name, handle in living.items() if name.startswith("engine-")}
        rollout = living.get("rollout")
        loads, in_flight, sights = await asyncio.gather(
            asyncio.gather(*(_answer(handle.load.remote()) for handle in engines.values())),
            _answer(rollout.groups_in_flight.remote()) if rollout is not None else _nothing(),
            asyncio.gather(*(_answer(self._nodes[node][1].look.remote(pids[node])) for node in nodes)),
        )
        return Sight(
            engines={name: load for name, load in zip(engines, loads, strict=True) if load is not None},
            groups_in_flight=in_flight,
            nodes={self._nodes[node][0]: sight for node, sight in zip(nodes, sights, strict=True) if sight is not None},
        )

    def close(self) -> None:
        """End the observers; where the cluster is gone, they are too."""
        for task in self._asked.values():
            task.cancel()
        for _, observer in self._nodes.values():
            with contextlib.suppress(*CLUSTER_GONE):
                ray.kill(observer)
        self._nodes.clear()

    def _living(self) -> tuple[dict[str, Any], list[str]]:
        """The run's actors by name; the nodes of the cluster, each with an observer by now."""
        living = {}
        for name in self._groups.names:
            try:
                living[name] = ray.get_actor(name, namespace=self._groups.namespace)
            except ValueError:  # dead, or not made yet
                continue
        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        for node in nodes.keys() - self._nodes.keys():
            address, port = nodes[node]["NodeManagerAddress"], nodes[node]["NodeManagerPort"]
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            observer = ray.remote(NodeObserver).options(num_cpus=0, scheduling_strategy=there)
            self._nodes[node] = (address, observer.remote(address, port))
        return living, list(nodes)

    def _meet(self, living: Mapping[str, Any]) -> None:
        """Ask new actors where they are; a busy one answers when it is done."""

        async def ask(name: str, handle: Any) -> None:
            try:
                node, pid = await handle.__ray_call__.remote(_whereabouts)
            except Exception as error:  # noqa: BLE001  of a process that died meanwhile: the next one is asked again
                logger.debug("%s did not say where it is: %s", name, error)
            else:
                self._processes[handle._actor_id] = (name, node, pid)

        for name, handle in living.items():
            actor_id = handle._actor_id
            if actor_id not in self._processes and actor_id not in self._asked:
                self._asked[actor_id] = asyncio.create_task(ask(name, handle))


async def _answer(call: Any) -> Any:
    """None from whoever is dead or slow."""
    try:
        return await one(call, ANSWER_SECONDS, "observation")
    except RlhfError:
        return None


async def _nothing() -> None:
    """Where there is nobody to ask."""


def _whereabouts(_: Any) -> tuple[str, int]:
    return ray.get_runtime_context().get_node_id(), os.getpid()


def _object_store(address: str, port: int) -> tuple[int | None, int | None]:
    """(bytes taken, bytes there are) by the node's raylet."""
    from ray._private.internal_api import node_stats

    try:
        stats = node_stats(address, port, include_memory_info=False).store_stats
    except Exception as error:  # noqa: BLE001  Ray's own calls, whatever they raise: the number is then not known
        logger.debug("the raylet at %s:%d did not answer: %s", address, port, error)
        return None, None
    return int(stats.object_store_bytes_used), int(stats.object_store_bytes_avail)
