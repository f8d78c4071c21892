"""The actors of a run by name: found if they live, made if not, each in its slot. Names are unique within the run's namespace.

::

    reserve ─▶ the run's placement groups (``bundles``) ─▶ actor(role, index), in the bundle where ``placement`` seats it
    discard ─▶ actors, keeper and placement groups are gone

The light workers and the keeper sit outside the bundles.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from rlhf_core.cluster.bundles import Bundles, release
from rlhf_core.cluster.critic_worker import CriticWorker
from rlhf_core.cluster.engine_worker import EngineWorker
from rlhf_core.cluster.keeper import Keeper
from rlhf_core.cluster.placement import LIGHT_CPUS, LIGHT_WORKERS
from rlhf_core.cluster.policy_worker import PolicyWorker, ReferenceWorker
from rlhf_core.cluster.reward_worker import RewardModelWorker
from rlhf_core.cluster.rollout_worker import RolloutWorker
from rlhf_core.cluster.scoring_worker import ScoringWorker
from rlhf_core.cluster.wait import on_this_cluster
from rlhf_core.generation.settings import EngineSettings, engine_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlhf_core.cluster.context import BaseContext
    from rlhf_core.cluster.placement import Placement
    from rlhf_core.config import Config, SupervisedConfig

# Idle threads that spin take the cores from the other processes of the machine (factor 3 to 4 on busy cores).
WORKER_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


# A killed actor keeps its name for a moment; a new one must not be mistaken for it.
NAME_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Member:
    """One kind of actor of a run."""

    kind: type
    count: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)


class ActorGroups:
    """Finds or makes the actors of one run. ``reserve`` first.

    Args:
        context: what each actor is told.
        members: by role; those of which there are none are left out.
        placement: where each sits.
    """

    def __init__(
        self, context: BaseContext[Config | SupervisedConfig], members: Mapping[str, Member], placement: Placement
    ) -> None:
        self._context = context
        self._members = {role: member for role, member in members.items() if member.count}
        self._placement = placement
        self._bundles = Bundles(self.namespace, placement.groups)
        self._reserving = threading.Lock()

    @property
    def namespace(self) -> str:
        """Ray namespace of the run."""
        return f"rlhf-{self._context.run_id}"

    @property
    def names(self) -> list[str]:
        """Every actor but the keeper."""
        return [name for role in self._members for name in self.names_of(role)]

    @on_this_cluster()
    def reserve(self, seconds: float) -> None:
        """Room for every process that sits in a slot: found, or made. Blocks: call in a thread.

        Slots of another shape, which an earlier attempt left, are given up with the actors in them.

        Raises:
            DeadlineError: the cluster has no room within ``seconds``; what it lacks, and who holds it.
        """
        with self._reserving:  # several groups of processes may be made again at the same time
            if not self._bundles.fit:
                seated = [name for name in self.names if name not in LIGHT_WORKERS]
                self.kill([*seated, *self.strays()])
            self._bundles.reserve(seconds)

    @on_this_cluster()
    def discard(self) -> None:
        """End every actor of the run, whoever made it, and give its slots back."""
        self.kill([*self.names, *self.strays(), "keeper"])
        release(self.namespace)

    @on_this_cluster()
    def check_cluster(self) -> None:
        """Ask the cluster anything at all: ``ClusterLostError`` if it is gone."""
        ray.util.list_named_actors(all_namespaces=True)

    @on_this_cluster()
    def strays(self) -> list[str]:
        """Living actors of the run that are none of these: left by an attempt with more processes."""
        known = {*self.names, "keeper"}
        living = ray.util.list_named_actors(all_namespaces=True)
        return [
            actor["name"] for actor in living if actor["namespace"] == self.namespace and actor["name"] not in known
        ]

    def count(self, role: str) -> int:
        """Actors of a role."""
        return self._members[role].count if role in self._members else 0

    def names_of(self, role: str) -> list[str]:
        """``policy-0``, ``policy-1``, …; the light workers are one each and have no number."""
        if role in LIGHT_WORKERS:
            return [role]
        return [f"{role}-{index}" for index in range(self.count(role))]

    def actor(self, role: str, index: int = 0) -> Any:
        """One actor of a role, in its slot."""
        member, name = self._members[role], self.names_of(role)[index]
        if role in LIGHT_WORKERS:
            arguments: tuple[int, ...] = ()
            where: dict[str, Any] = {"num_cpus": LIGHT_CPUS, "num_gpus": 0}
        else:
            seat = self._placement.seat(name)
            arguments = (index,)
            where = {
                "num_cpus": seat.share.cpus,
                "num_gpus": seat.share.gpus,
                "scheduling_strategy": self._bundles.strategy(seat.group, seat.slot),
            }
        remote = ray.remote(member.kind).options(
            name=name,
            namespace=self.namespace,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=0,  # a restarted process would have lost its weights: the session rebuilds it, and its version
            max_task_retries=0,
            runtime_env={"env_vars": {**WORKER_ENVIRONMENT, **member.environment}},
            **where,
        )
        with on_this_cluster():
            return remote.remote(self._context, *arguments)

    def keeper(self, seconds: float) -> Any:
        """The holder of the actors' lease."""
        remote = ray.remote(Keeper).options(
            name="keeper", namespace=self.namespace, lifetime="detached", get_if_exists=True, num_cpus=0
        )
        with on_this_cluster():
            return remote.remote(self.namespace, seconds)

    @on_this_cluster()
    def kill(self, names: list[str]) -> None:
        """End actors, and wait until their names are free; those that are gone already do not matter."""
        for name in names:
            try:
                ray.kill(ray.get_actor(name, namespace=self.namespace))
            except ValueError:
                continue
        deadline = time.monotonic() + NAME_SECONDS
        while time.monotonic() < deadline and any(self._is_taken(name) for name in names):
            time.sleep(0.02)

    def _is_taken(self, name: str) -> bool:
        try:
            ray.get_actor(name, namespace=self.namespace)
        except ValueError:
            return False
        return True


def run_members(config: Config, placement: Placement, threads: int) -> dict[str, Member]:
    """The actors of a run by rewards.

    Args:
        config: the run's.
        placement: of the run.
        threads: of each training rank on CPU.
    """
    counts, rank, light = placement.counts, rank_environment(threads), {"OMP_NUM_THREADS": "1"}
    return {
        "engine": Member(EngineWorker, counts["engine"], _engine_environment(config, placement)),
        "policy": Member(PolicyWorker, counts["policy"], rank),
        "critic": Member(CriticWorker, counts["critic"], rank),
        "reference": Member(ReferenceWorker, counts["reference"], rank),
        "reward": Member(RewardModelWorker, counts["reward"], rank),
        "rollout": Member(RolloutWorker, 0 if config.is_replay else 1, light),
        "scoring": Member(ScoringWorker, 1, light),
    }


def rank_environment(threads: int) -> dict[str, str]:
    """What a training rank's process must find in its environment."""
    return {"OMP_NUM_THREADS": str(threads)}


def _engine_environment(config: Config, placement: Placement) -> dict[str, str]:
    """What an engine's process must find in its environment before it imports vLLM."""
    settings = EngineSettings.from_config(config, config.actor.model_name_or_path, placement.device)
    environment = engine_environment(settings)
    seat = placement.seat("engine-0") if placement.counts["engine"] else None
    if seat is None or not seat.worker_slots:
        return environment
    # Every engine is alike: each has a placement group of its own.
    return environment | {
        "VLLM_RAY_BUNDLE_INDICES": ",".join(map(str, seat.worker_slots)),
        "VLLM_RAY_PER_WORKER_GPUS": f"{seat.worker_gpus:g}",
    }
