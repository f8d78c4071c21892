"""The actors of a run by name: found if they live, made if not. Names are unique within the run's namespace."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import ray

from rlhf_core.cluster.engine_worker import EngineWorker
from rlhf_core.cluster.keeper import Keeper
from rlhf_core.cluster.placement import reference_ranks
from rlhf_core.cluster.rollout_worker import RolloutWorker
from rlhf_core.cluster.scoring_worker import ScoringWorker
from rlhf_core.cluster.trainer_worker import PolicyWorker, ReferenceWorker
from rlhf_core.generation.settings import EngineSettings, engine_environment

if TYPE_CHECKING:
    from rlhf_core.cluster.context import WorkerContext
    from rlhf_core.cluster.placement import Placement, Share

# Idle threads that spin take the cores from the other processes of the machine (factor 3 to 4 on busy cores).
WORKER_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


# A killed actor keeps its name for a moment; a new one must not be mistaken for it.
NAME_SECONDS = 10.0


class ActorGroups:
    """Finds or makes the actors of one run."""

    def __init__(self, context: WorkerContext, placement: Placement, threads: int) -> None:
        """``threads``: of each training rank on CPU."""
        self._context = context
        self._placement = placement
        config = context.config
        self.num_engines = config.vllm.num_engines
        self.num_policy = config.actor.world_size
        self.num_reference = reference_ranks(config) if config.needs_reference else 0
        self._threads = threads

    @property
    def namespace(self) -> str:
        """Ray namespace of the run."""
        return f"rlhf-{self._context.run_id}"

    @property
    def names(self) -> list[str]:
        """Every actor but the keeper."""
        return [
            *(f"engine-{i}" for i in range(self.num_engines)),
            *self.policy_names,
            *self.reference_names,
            "rollout",
            "scoring",
        ]

    @property
    def policy_names(self) -> list[str]:
        """The policy's ranks."""
        return [f"policy-{i}" for i in range(self.num_policy)]

    @property
    def reference_names(self) -> list[str]:
        """The reference model's ranks."""
        return [f"reference-{i}" for i in range(self.num_reference)]

    def engine(self, index: int) -> Any:
        """One rollout engine."""
        return self._actor(EngineWorker, f"engine-{index}", self._placement.engine, self.engine_environment, index)

    @property
    def engine_environment(self) -> dict[str, str]:
        """What an engine's process must find in its environment before it imports vLLM."""
        config, device = self._context.config, self._context.device
        settings = EngineSettings.from_config(config, config.actor.model_name_or_path, device)
        return engine_environment(settings)

    def policy(self, rank: int) -> Any:
        """One rank of the policy."""
        return self._actor(PolicyWorker, f"policy-{rank}", self._placement.policy, self.rank_environment, rank)

    def reference(self, rank: int) -> Any:
        """One rank of the reference model."""
        return self._actor(ReferenceWorker, f"reference-{rank}", self._placement.reference, self.rank_environment, rank)

    def rollout(self) -> Any:
        """The rollout worker."""
        return self._actor(RolloutWorker, "rollout", self._placement.light, {"OMP_NUM_THREADS": "1"})

    def scoring(self) -> Any:
        """The scoring worker."""
        return self._actor(ScoringWorker, "scoring", self._placement.light, {"OMP_NUM_THREADS": "1"})

    def keeper(self, seconds: float) -> Any:
        """The holder of the actors' lease."""
        remote = ray.remote(Keeper).options(
            name="keeper", namespace=self.namespace, lifetime="detached", get_if_exists=True, num_cpus=0
        )
        return remote.remote(self.namespace, seconds)

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

    @property
    def rank_environment(self) -> dict[str, str]:
        """What a training rank's process must find in its environment."""
        return {**WORKER_ENVIRONMENT, "OMP_NUM_THREADS": str(self._threads)}

    def _actor(self, kind: type, name: str, share: Share, environment: dict[str, str], *args: Any) -> Any:
        remote = ray.remote(kind).options(
            name=name,
            namespace=self.namespace,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=share.cpus,
            num_gpus=share.gpus,
            max_restarts=0,  # a restarted process would have lost its weights: the session rebuilds it, and its version
            max_task_retries=0,
            runtime_env={"env_vars": {**WORKER_ENVIRONMENT, **environment}},
        )
        return remote.remote(self._context, *args)
