"""The processes of a run: found or made, healthy, and at the right policy version before they are used.

::

    open ──▶ leases ──▶ actors (found by name, or made) ──▶ ensure(version) ──▶ stage calls … ──▶ close
                                                              │
              policy or critic at another version, or dead ───┤ newest checkpoint + recorded updates, digests checked
              engine dead, or at another version ─────────────┘ made again, weights synced

A replay, which trains on what another run sampled, has neither engines nor a rollout worker.

Actors outlive a crash of the controller: the next attempt finds them. They go away once the keeper's lease is not renewed.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.cluster.actor_session import DIGEST, ActorSession
from rlhf_core.cluster.placement import LIGHT_WORKERS
from rlhf_core.cluster.rank_group import (
    RankGroup,
    Recorded,
    TrainedGroup,
    any_dead,
    blaming_the_dead,
    quietly,
    versions_of,
)
from rlhf_core.cluster.wait import all_of
from rlhf_core.errors import DeadlineError, StorageError, WeightSyncError, WorkerError
from rlhf_core.records import Stage, StageRef
from rlhf_core.telemetry import get_logger
from rlhf_core.user_file import FROM_FILE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from rlhf_core.cluster.context import WorkerContext
    from rlhf_core.cluster.groups import ActorGroups
    from rlhf_core.cluster.rollout_worker import DataFacts, RolloutOutcome
    from rlhf_core.cluster.scoring_worker import Answers, Assembled, Scored
    from rlhf_core.records import Draw, Part
    from rlhf_core.rewards.normalise import NormState
    from rlhf_core.storage import FileEntry, Lease, RunStore

logger = get_logger(__name__)

CRITIC_DIGEST = "critic_digest"


@dataclass(frozen=True, slots=True)
class PlannedSteps:
    """Optimizer steps of the whole run: the learning rates depend on them."""

    policy: int
    critic: int


@dataclass(frozen=True, slots=True)
class Updated:
    """What an update left behind."""

    metrics: dict[str, float]
    digests: dict[str, str]  # digest, and critic_digest where there is a critic
    optimizer_steps: int  # of the policy, so far


class RunSession(ActorSession):
    """The processes of a run by rewards. ``open`` first."""

    def __init__(self, context: WorkerContext, groups: ActorGroups, lease: Lease) -> None:
        self.context = context
        self.config = context.config
        self.store: RunStore = context.store
        run = self.config.run
        super().__init__(groups, lease, run)
        must_match = context.device == "cpu" or self.config.train.full_determinism_enable
        self._rollout: Any = None
        self._scoring: Any = None
        self._engines: list[Any] = []
        self._policy = TrainedGroup("policy", DIGEST, self.store, must_match, groups, self._tenure, run)
        self._critic = TrainedGroup("critic", CRITIC_DIGEST, self.store, must_match, groups, self._tenure, run)
        self._reference = RankGroup("reference", groups, self._tenure, run)
        self._reward = RankGroup("reward", groups, self._tenure, run, meet=False)

    # --- life ---------------------------------------------------------------------------------------------------------

    async def open(self, plan_steps: Callable[[DataFacts | None], Awaitable[PlannedSteps]]) -> None:
        """Find or make every actor.

        Args:
            plan_steps: told what the prompts are (None: of a replay), answers with the optimizer steps of the whole run, or
                raises.

        Raises:
            DeadlineError: an actor did not start within ``run.start_timeout``.
            WorkerError: an actor died while starting.
        """
        self._tenure.begin()
        # Always anew: an earlier attempt's would still hold the task and reward files that have been mended since. So would
        # a half dead group of reference ranks hold up the ranks that join it.
        own_loss = FROM_FILE.fullmatch(self.config.actor.policy_loss_type)
        loaded = self._groups.names_of("policy") if own_loss else []
        await self._kill([*LIGHT_WORKERS, *self._groups.names_of("reference"), *loaded])
        self._rollout = self._groups.actor("rollout") if self._groups.count("rollout") else None
        self._scoring = self._groups.actor("scoring")
        self._engines = [self._groups.actor("engine", index) for index in range(self._groups.count("engine"))]
        for group in (self._policy, self._critic, self._reference, self._reward):
            group.find()
        loading = [
            asyncio.ensure_future(self._start_engines(self._engines)),
            asyncio.ensure_future(self._start_scoring()),
        ]
        try:
            steps = await plan_steps(await self._start_rollout())
            self._policy.total_steps, self._critic.total_steps = steps.policy, steps.critic
            await asyncio.gather(self._policy.begin(), self._critic.begin(), self._reference.start(), *loading)
        finally:
            for task in loading:
                task.cancel()

    async def tidy(self) -> None:
        """Reward processes, shared memory: what would outlive a killed actor."""
        actors = [actor for actor in (*self._engines, self._rollout, self._scoring) if actor is not None]
        await asyncio.gather(*(quietly(actor.shutdown) for actor in actors), self._policy.shutdown())

    # --- versions -----------------------------------------------------------------------------------------------------

    async def ensure(self, version: int) -> None:
        """Every actor alive; policy, critic and engines at ``version``."""
        if await self._is_ready(version):
            return
        await self._ensure_asked()
        await self._policy.ensure(version, self._policy_update)
        await self._critic.ensure(version, self._critic_update)
        await self._ensure_engines(version)

    async def _is_ready(self, version: int) -> bool:
        """True if nothing is to be done: all are asked at once."""
        dead, held = await asyncio.gather(
            any_dead([*self._samplers, self._scoring, *self._reference.ranks, *self._reward.ranks]),
            versions_of([*self._policy.ranks, *self._critic.ranks, *self._engines]),
        )
        return not dead and set(held) == {version}

    async def _ensure_asked(self) -> None:
        """Those that hold no version: rollout, rewards, reference."""
        if await any_dead(self._samplers):
            await self._kill(["rollout"])
            self._rollout = self._groups.actor("rollout")
            await self._start_rollout()
        if await self._reward.dead():
            await self._reward.replace()
            await self._kill(["scoring"])  # it knows the old ones
        if await any_dead([self._scoring]):
            await self._kill(["scoring"])
            self._scoring = self._groups.actor("scoring")
            await self._start_scoring()
        if await self._reference.dead():
            await self._reference.replace()
            await self._reference.start()

    async def _policy_update(self, iteration: int) -> Recorded:
        body, experience = await self._recorded(iteration)
        what = f"update of iteration {iteration}"
        return Recorded(
            body[DIGEST], lambda: self._policy.call("update", iteration, experience, body["kl_coef"], what=what)
        )

    async def _critic_update(self, iteration: int) -> Recorded:
        body, experience = await self._recorded(iteration)
        what = f"critic's update of iteration {iteration}"
        return Recorded(body[CRITIC_DIGEST], lambda: self._critic.call("update", iteration, experience, what=what))

    async def _recorded(self, iteration: int) -> tuple[dict[str, Any], StageRef]:
        """The record of an update, and the experience it was made from."""
        recorded = await asyncio.to_thread(self.store.stage, iteration, Stage.UPDATE)
        experience = await asyncio.to_thread(self.store.stage, iteration, Stage.EXPERIENCE)
        if recorded is None or experience is None:
            raise StorageError(
                f"{self.store.url}: the log has no complete update of iteration {iteration}: cannot restore"
            )
        return recorded[0].body, experience[1]

    async def _ensure_engines(self, version: int) -> None:
        if not self._engines:
            return
        held = await versions_of(self._engines)
        for index, found in enumerate(held):
            if found is None or found < 0:
                logger.warning("engine %d is dead: making it again", index)
                await self._kill([self._groups.names_of("engine")[index]])
                self._engines[index] = self._groups.actor("engine", index)
        fresh = [self._engines[i] for i, found in enumerate(held) if found is None or found < 0]
        await self._start_engines(fresh)
        if fresh or set(held) != {version}:
            await self.sync(version)

    async def sync(self, version: int) -> None:
        """Hand the policy's weights, at ``version``, to every engine, and check that each stamped them.

        Raises:
            WorkerError: they did not arrive whole, or not within ``vllm.sync_timeout``; with the engine's own text.
        """
        seconds = self.config.vllm.sync_timeout
        what = f"weight sync to version {version}"
        try:
            await self._policy.call("sync", self._engines, seconds, what=what, seconds=seconds)
        except (WeightSyncError, DeadlineError) as error:
            # The engine refuses to speak with damaged weights, or does not answer: it is made again.
            raise WorkerError(str(error)) from error
        held = await versions_of(self._engines)
        if set(held) != {version}:
            raise WorkerError(f"after a weight sync the engines hold versions {held}, not {version}")

    # --- stages -------------------------------------------------------------------------------------------------------

    async def rollout(self, draw: Draw) -> RolloutOutcome:
        """Sample a batch, or a round of one."""
        what = f"rollout of iteration {draw.iteration}"
        played: RolloutOutcome = (await self._stage([self._rollout.rollout.remote(draw, self._engines)], what))[0]
        if played.tally.failed:
            await self._believe([self._rollout], what)
        return played

    async def check_tokens(self, parts: Sequence[Part]) -> None:
        """Refuse trajectories that another tokenizer made; see ``ScoringWorker.check_tokens``."""
        await self._stage([self._scoring.check_tokens.remote(parts)], "tokens of the trajectories")

    async def score(
        self, iteration: int, parts: Sequence[Part], norm_state: NormState, groups: Collection[str] | None = None
    ) -> Scored:
        """Score what a rollout, or a round of one, left: all of it, or only these groups."""
        what = f"rewards of iteration {iteration}"
        call = self._scoring.score.remote(iteration, parts, norm_state, groups)
        scored: Scored = (await self._stage([call], what))[0]
        if scored.failures:
            await self._believe([self._scoring], what)
        return scored

    async def assemble(self, iteration: int, rollout: StageRef, reward: StageRef, kl_coef: float) -> Assembled:
        """Recompute log-probs and values on every rank, and turn rewards into advantages."""
        # Object references: the arrays go from the ranks to the scoring worker, never through this process.
        answers: Answers = {
            "policy": [rank.logprobs.remote(rollout, reward) for rank in self._policy.ranks],
            "reference": [rank.logprobs.remote(rollout, reward) for rank in self._reference.ranks],
            "critic": [rank.values.remote(rollout, reward) for rank in self._critic.ranks],
        }
        what = f"advantages of iteration {iteration}"
        async with blaming_the_dead([*self._policy.ranks, *self._reference.ranks, *self._critic.ranks], what):
            call = self._scoring.assemble.remote(iteration, rollout, reward, kl_coef, answers)
            return (await self._stage([call], what))[0]  # type: ignore[no-any-return]

    async def update(self, iteration: int, experience: StageRef, kl_coef: float) -> Updated:
        """One update of the policy and, at the same time, of the critic."""
        what = f"update of iteration {iteration}"
        policy, critic = await asyncio.gather(
            self._policy.call("update", iteration, experience, kl_coef, what=what),
            self._critic.call("update", iteration, experience, what=f"critic's {what}"),
        )
        metrics = {**policy[0], **(critic[0] if critic else {})}
        return Updated(metrics, await self.digests(), await self._policy.optimizer_steps())

    async def digests(self) -> dict[str, str]:
        """Of the weights of policy and critic."""
        groups = [group for group in (self._policy, self._critic) if group.ranks]
        found = await asyncio.gather(*(group.digest() for group in groups))
        return {group.digest_key: digest for group, digest in zip(groups, found, strict=True)}

    async def save(self, version: int) -> list[FileEntry]:
        """Every rank of policy and critic writes its part of a checkpoint."""
        shares = await asyncio.gather(self._policy.save(version), self._critic.save(version))
        return [entry for share in shares for entry in share]

    async def evaluate(
        self, version: int
    ) -> tuple[tuple[Part, ...], dict[str, float], list[dict[str, Any]], list[dict[str, Any]]]:
        """Answer the held-out prompts and score the answers: shards, metrics, a few rows for people, each prompt's outcome."""
        what = f"evaluation of version {version}"
        parts, rollout = (await self._stage([self._rollout.evaluate.remote(version, self._engines)], what))[0]
        rows = self.config.run.sample_rows
        metrics, samples, outcomes = (await self._stage([self._scoring.judge.remote(parts, rows)], what))[0]
        if metrics["eval/failed"]:
            await self._believe([self._rollout, self._scoring], what)
        return parts, {**metrics, "eval/seconds": rollout["rollout/seconds"]}, samples, outcomes

    async def samples(self, rollout: StageRef, reward: StageRef, count: int) -> list[dict[str, Any]]:
        """Readable rows of an iteration."""
        return (await self._stage([self._scoring.samples.remote(rollout, reward, count)], "sample answers"))[0]  # type: ignore[no-any-return]

    # --- private ------------------------------------------------------------------------------------------------------

    @property
    def _samplers(self) -> list[Any]:
        """The rollout worker, where there is one."""
        return [] if self._rollout is None else [self._rollout]

    async def _start_rollout(self) -> DataFacts | None:
        """What the prompts are; None without a worker that owns them."""
        facts = await self._starting([worker.start.remote() for worker in self._samplers], "rollout")
        return facts[0] if facts else None

    async def _start_engines(self, engines: Sequence[Any]) -> None:
        await self._starting([engine.start.remote() for engine in engines], "engines")

    async def _start_scoring(self) -> None:
        """The reward model first: how long a text it reads is asked by its source."""
        max_lens = await self._reward.start()
        max_len = min(max_lens) if max_lens else None
        await self._starting([self._scoring.start.remote(self._reward.ranks, max_len)], "scoring")

    async def _starting(self, calls: Sequence[Any], what: str) -> list[Any]:
        return await all_of(calls, self.config.run.start_timeout, f"start of {what} (run.start_timeout)")

    async def _stage(self, calls: Sequence[Any], what: str) -> list[Any]:
        self.check_lease()
        return await all_of(calls, self.config.run.stage_timeout, f"{what} (run.stage_timeout)")

    async def _believe(self, workers: Sequence[Any], what: str) -> None:
        """Look whether failures of samples, as these workers tell of them, are the samples' own.

        Where a node or the cluster goes down, the processes of rewards and environments are killed before the worker that
        reports their deaths: recorded, the failures would stand for good, and the samples would be lost.

        Raises:
            WorkerError: one of the workers is gone too.
            ClusterLostError: the cluster is.
        """
        await asyncio.to_thread(self._groups.check_cluster)
        if await any_dead(workers):
            raise WorkerError(
                f"{what}: samples failed in a process that has died since: what it said of them does not count"
            )

    async def _kill(self, names: Sequence[str]) -> None:
        self.check_lease()
        await asyncio.to_thread(self._groups.kill, list(names))


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))
