"""Processes that go from run to run, so that 69 runs fit into half an hour: an engine takes 20 s to start, a rank 10 s.

::

    run 1 ─ ActorGroups.actor ─▶ warm process ─ adopt ─▶ a new worker in it ─ start … shutdown ─▶ run 2

Each run has workers of its own: ``adopt`` makes a new one, by the constructor of the real class, in a process that has loaded
its libraries already. The real worker then starts as always: tokenizer, prompts and agent, reward functions, a new model
under a new DeepSpeed engine. One thing is handed on that a worker holds: vLLM's engine, of the same model and settings. It
takes no part in what a run computes but by its weights, and these it is sent by the new run before it speaks: ``adopt``
leaves it with a version that no run has, which the session heals by a weight sync, as it heals any engine that fell behind.

Everything else is the run's own and real: flows, tasks, session, leases and their keeper, storage, the processes of agents
and of reward functions. Not covered here is what ``ActorGroups`` asks of Ray (placement, resources, restarts): tests/pipeline
starts every process anew.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import ray
from ray.exceptions import RayActorError

from rlhf_core.cluster.engine_worker import EngineWorker
from rlhf_core.cluster.groups import WORKER_ENVIRONMENT, ActorGroups
from rlhf_core.cluster.images import image_loader

OF_ANOTHER_RUN = 1_000_000  # a version that no run asks for


class WarmEngine(EngineWorker):
    """A worker that hands its engine on."""

    async def adopt(self, context: Any, index: int) -> None:
        """Become the engine of another run."""
        await self.shutdown()
        engine = self._engine
        EngineWorker.__init__(self, context, index)
        if engine is not None:
            self._engine = engine
            engine._version = OF_ANOTHER_RUN
            if engine._images is not None:
                engine._images._load = image_loader(context.store)

    async def shutdown(self) -> None:
        """End what is of the run: its sessions and their server, and its requests."""
        if self._sessions is not None:
            await self._sessions.stop()
            self._sessions = None
        if self._engine is not None:
            await self._engine.drop_requests()


def warm(kind: type) -> type:
    """The class of a worker that becomes a new one for each run."""
    if kind is EngineWorker:
        return WarmEngine

    class Warm(kind):
        def adopt(self, *arguments: Any) -> None:
            kind.__init__(self, *arguments)

    return Warm


class WarmGroups(ActorGroups):
    """Takes the actors of a run from the pool. One run at a time."""

    pool: ClassVar[dict[Any, Any]] = {}

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._mine: dict[str, Any] = {}

    def actor(self, role: str, index: int = 0) -> Any:
        name, member = self.names_of(role)[index], self._members[role]
        if name not in self._mine:
            model = self._context.config.actor.model_name_or_path if role == "engine" else None
            self._mine[name] = self._adopted((name, model), member)
        return self._mine[name]

    def _adopted(self, key: tuple[str, str | None], member: Any) -> Any:
        name = key[0]
        arguments = (int(name.split("-")[1]),) if "-" in name else ()
        if key in self.pool:
            try:
                ray.get(self.pool[key].adopt.remote(self._context, *arguments), timeout=30)
            except RayActorError:  # a run ended it
                del self.pool[key]
        if key not in self.pool:
            self.pool[key] = _process(member).remote(self._context, *arguments)
        return self.pool[key]

    def kill(self, names: list[str]) -> None:
        """What a run ends, it gets anew; what another may use goes on living."""
        super().kill([name for name in names if name == "keeper"])
        for name in names:
            self._mine.pop(name, None)

    @classmethod
    def clear(cls) -> None:
        """End all: what a run that failed left in them would be found by the next."""
        for actor in cls.pool.values():
            ray.kill(actor)
        cls.pool.clear()


def _process(member: Any) -> Any:
    environment = {**WORKER_ENVIRONMENT, **member.environment}
    return ray.remote(warm(member.kind)).options(num_cpus=0, max_restarts=0, runtime_env={"env_vars": environment})


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
