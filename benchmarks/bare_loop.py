"""The training loop as a script would write it: the same engines and ranks, nothing recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf_core.cluster.connect import connect
from rlhf_core.cluster.groups import WORKER_ENVIRONMENT, run_members
from rlhf_core.cluster.placement import place
from rlhf_core.cluster.policy_worker import PolicyWorker
from rlhf_core.cluster.rank_worker import Seat
from rlhf_core.cluster.rollout_worker import RolloutWorker
from rlhf_core.cluster.router import EngineRouter
from rlhf_core.cluster.session import cores
from rlhf_core.records import PromptCursor

if TYPE_CHECKING:
    from rlhf_core.cluster.context import WorkerContext
    from rlhf_core.config import Config
    from rlhf_core.records import Experience, Trajectory


class MemoryRollout(RolloutWorker):
    """Plays a batch, scores it on the spot and hands the rows over in memory."""

    async def play(
        self, iteration: int, cursor: PromptCursor, engines: list[Any]
    ) -> tuple[list[Trajectory], PromptCursor]:
        from rlhf_core.agents import FailureWatch, GroupPublisher, play
        from rlhf_core.rewards.builtins import digits

        indices, after = self._order.draw(cursor, self._config.rollout.batch_size)
        prompts = [(f"{iteration}-{i}", self._prompts[j]) for i, j in enumerate(indices)]
        router = EngineRouter(engines, self._config.vllm.request_timeout)
        groups = self.episodes(
            iteration, prompts, self._config.rollout.n_samples_per_prompt, self._training_sampling, router
        )
        kept: list[Trajectory] = []
        publisher = GroupPublisher(lambda rows: kept.extend(rows), groups_per_shard=1)  # type: ignore[arg-type, return-value]
        await play(self._agent.executor, groups, publisher, FailureWatch(1))
        await router.close()
        kept.sort(key=lambda row: row.key)
        rewards = digits(
            ["" for _ in kept], ["" for _ in kept], [None for _ in kept], answers=[row.answer for row in kept]
        )
        return [replace(row, reward=float(r)) for row, r in zip(kept, _list(rewards), strict=True)], after


class MemoryPolicy(PolicyWorker):
    """Computes log-probs of rows where they are needed, advantages, and the update, without a shard in between."""

    def train(self, rows: list[Trajectory], iteration: int) -> float:
        from rlhf_core.cluster.experience import make_experience

        old = None
        if not self._config.reuses_logprobs:
            old = {rows[i].key: values for i, values in self._running.logprobs(rows).items()}
        experience: list[Experience]
        experience, _ = make_experience(rows, old, None, None, 0.0, self._config)
        return self._running.update(experience, iteration).grad_norm


class BareLoop:
    """One engine and one rank."""

    def __init__(self, config: Config, context: WorkerContext) -> None:
        import ray

        self._context = replace(context, run_id=f"{context.run_id}-bare")
        members = run_members(config, place(config, connect(None)), threads=config.run.cpu_threads or cores())

        def actor(kind: type, role: str, *arguments: Any) -> Any:
            environment = {**WORKER_ENVIRONMENT, **members[role].environment}
            options = {"num_cpus": 0, "runtime_env": {"env_vars": environment}}
            return ray.remote(kind).options(**options).remote(self._context, *arguments)

        from rlhf_core.cluster.engine_worker import EngineWorker

        self._engine = actor(EngineWorker, "engine", 0)
        self._policy = actor(MemoryPolicy, "policy", 0)
        self._rollout = actor(MemoryRollout, "rollout")
        self._cursor = PromptCursor()

    async def start(self, total_steps: int) -> None:
        """Load everything."""
        await self._engine.start.remote()
        await self._rollout.start.remote()
        address, port = await self._policy.rendezvous.remote()
        await self._policy.start.remote(Seat(0, 1, address, port), total_steps)

    async def iterate(self, iteration: int) -> None:
        """Rollout, update, weight sync."""
        play = self._rollout.play.options(num_returns=2).remote(iteration, self._cursor, [self._engine])
        rows, cursor = play
        await self._policy.train.remote(rows, iteration)
        self._cursor = await cursor
        await self._policy.sync.remote([self._engine], 600)

    def stop(self) -> None:
        """End the actors."""
        import ray

        for handle in (self._engine, self._policy, self._rollout):
            ray.kill(handle)


def _list(rewards: Any) -> list[float]:
    return list(rewards["rewards"]) if isinstance(rewards, dict) else list(rewards)
