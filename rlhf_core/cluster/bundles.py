"""The placement groups of a run in Ray: found by their names, or made; gone with the run.

::

    reserve ─▶ those of an earlier attempt, of the same shape ──────────────────────────────────┐
           └─▶ of another shape, or none ─▶ removed, made ─▶ every bundle has its node ─────────┴─▶ strategy(group, bundle)

Ray knows the name of a placement group only within the namespace of the process that asks, which is another for every
controller; so they are looked up in the table of all, by names that are unique to the run.

Where a node dies, Ray looks for other nodes for its bundles by itself; ``reserve`` waits for that too.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf_core.errors import DeadlineError
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlhf_core.cluster.placement import SlotGroup

logger = get_logger(__name__)

POLL_SECONDS = 0.05
REMOVAL_SECONDS = 10.0  # a removed group stays in the table for a moment


class Bundles:
    """The placement groups of one run. Blocks: call in a thread.

    Args:
        namespace: of the run's actors.
        groups: what it needs.
    """

    def __init__(self, namespace: str, groups: Sequence[SlotGroup]) -> None:
        self._namespace = namespace
        self._wanted = {name_of(namespace, index): group for index, group in enumerate(groups)}
        self._held: list[PlacementGroup] = []

    @property
    def fit(self) -> bool:
        """True if Ray holds these, of this shape, and no others for the run."""
        living = living_groups(self._namespace)
        shapes = {name: _shape_of(entry) for name, entry in living.items()}
        return shapes == {name: _shape(group) for name, group in self._wanted.items()}

    def reserve(self, seconds: float) -> None:
        """Find them, or make them, and wait until every bundle has its node.

        Raises:
            DeadlineError: the cluster has no room within ``seconds``; what it lacks, and who holds it.
        """
        found = self.fit
        if not found:
            release(self._namespace)
            for name, group in self._wanted.items():
                strategy, bundles = _shape(group)
                ray.util.placement_group(list(bundles), strategy=strategy, name=name, lifetime="detached")
        deadline = time.monotonic() + seconds
        while not self._have_nodes(living := living_groups(self._namespace)):
            if time.monotonic() > deadline:
                message = _no_room(self._namespace, living, seconds)
                if not found:  # else they would take what others leave, for nobody
                    release(self._namespace)
                raise DeadlineError(message)
            time.sleep(POLL_SECONDS)
        self._held = [_handle(living[name]) for name in self._wanted]

    def strategy(self, group: int, bundle: int) -> PlacementGroupSchedulingStrategy:
        """How an actor is started in a bundle."""
        if not self._held:
            raise RuntimeError("nothing is reserved: call reserve() first")
        return PlacementGroupSchedulingStrategy(self._held[group], placement_group_bundle_index=bundle)

    def _have_nodes(self, living: Mapping[str, Mapping[str, Any]]) -> bool:
        return living.keys() == self._wanted.keys() and all(entry["state"] == "CREATED" for entry in living.values())


def name_of(namespace: str, index: int) -> str:
    """Of a run's placement group. The slash is in no run's id."""
    return f"{namespace}/{index}"


def living_groups(namespace: str) -> dict[str, dict[str, Any]]:
    """Those of a run that are not removed: Ray's entries by name."""
    return {entry["name"]: entry for entry in _all_living() if entry["name"].rpartition("/")[0] == namespace}


def release(namespace: str) -> None:
    """Remove a run's placement groups, and whatever still lives in them; wait until they are gone."""
    for entry in living_groups(namespace).values():
        ray.util.remove_placement_group(_handle(entry))
    deadline = time.monotonic() + REMOVAL_SECONDS
    while living_groups(namespace) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _all_living() -> list[dict[str, Any]]:
    return [entry for entry in ray.util.placement_group_table().values() if entry["state"] != "REMOVED"]


def _handle(entry: Mapping[str, Any]) -> PlacementGroup:
    return PlacementGroup(ray.PlacementGroupID(bytes.fromhex(entry["placement_group_id"])))


def _shape(group: SlotGroup) -> tuple[str, tuple[dict[str, float], ...]]:
    """(strategy, bundles) as Ray is asked for them."""
    wanted = ({"CPU": slot.cpus, "GPU": float(slot.gpus)} for slot in group.slots)
    bundles = tuple({name: amount for name, amount in bundle.items() if amount} for bundle in wanted)
    return "STRICT_PACK" if group.on_one_node else "PACK", bundles


def _shape_of(entry: Mapping[str, Any]) -> tuple[str, tuple[dict[str, float], ...]]:
    """The same of a group that Ray holds."""
    bundles = (entry["bundles"][index] for index in sorted(entry["bundles"]))
    rounded = tuple({name: round(amount, 4) for name, amount in bundle.items() if amount} for bundle in bundles)
    return entry["strategy"], rounded


# --- what to say where there is no room -------------------------------------------------------------------------------


def _no_room(namespace: str, living: Mapping[str, Mapping[str, Any]], seconds: float) -> str:
    """``living``: groups of the run, some of which wait."""
    waiting = [entry for entry in living.values() if entry["state"] != "CREATED"]
    homeless = [
        bundle
        for entry in waiting
        for index, bundle in entry["bundles"].items()
        if entry["state"] != "RESCHEDULING" or not _is_alive(entry["bundles_to_node_id"][index])
    ]
    kinds: dict[str, int] = {}
    for bundle in homeless:
        kinds[_amounts(bundle)] = kinds.get(_amounts(bundle), 0) + 1
    needs = ", ".join(f"{count} × ({kind})" for kind, count in kinds.items())
    together = (
        ", each group of them on one node" if any(entry["strategy"] == "STRICT_PACK" for entry in waiting) else ""
    )
    return (
        f"the cluster has no room for the processes of the run within {seconds:g} s (run.start_timeout): it needs {needs}"
        f"{together}; free: {_free()}; held by: {_holders(namespace)}. Wait until others end, or stop them; run fewer "
        "processes (`rlhf config check` draws them); or add nodes"
    )


def _is_alive(node_id: str) -> bool:
    return any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())


def _free() -> str:
    """Node by node: only that says whether a bundle fits. Ray has no public name for it; vLLM uses the same."""
    from ray._private.state import available_resources_per_node

    def of(left: Mapping[str, float], total: Mapping[str, float]) -> str:
        return ", ".join(f"{left.get(kind, 0):g} of {total.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU"))

    free = available_resources_per_node()
    living = (node for node in ray.nodes() if node["Alive"])
    return "; ".join(
        f"{node['NodeManagerAddress']} {of(free.get(node['NodeID'], {}), node['Resources'])}" for node in living
    )


def _holders(namespace: str) -> str:
    """Other runs' placement groups, and anybody else's, that have their bundles."""
    held: dict[str, dict[str, float]] = {}
    for entry in _all_living():
        owner = entry["name"].rpartition("/")[0]
        if owner == namespace or entry["state"] not in ("CREATED", "RESCHEDULING"):
            continue
        who = (
            f"run {owner.removeprefix('rlhf-')}"
            if owner.startswith("rlhf-")
            else entry["name"] or "a placement group without a name"
        )
        sums = held.setdefault(who, {})
        for bundle in entry["bundles"].values():
            for name, amount in bundle.items():
                sums[name] = sums.get(name, 0.0) + amount
    listed = [f"{who} ({_amounts(sums)})" for who, sums in held.items()]
    return ", ".join(listed) or "no other placement group (single actors and tasks of others are not listed)"


def _amounts(bundle: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(bundle.items()))
