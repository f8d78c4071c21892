"""The processes of a run: found or made, healthy, and at the right policy version before they are used.

::

    open ──▶ leases ──▶ actors (found by name, or made) ──▶ made ready for a stage ──▶ its calls … ──▶ close

    heal(version)                 policy, critic, reference  ─ dead, or at another version: newest checkpoint + recorded
                                                               updates, digests checked
    with_engines(oldest, newest)  rollout worker, engines    ─ dead: made again; at another version: weights synced
    with_scoring()                scoring worker, reward model

Iterations of the asynchronous pipelines overlap: stages of several of them run at the same time, but never two that use the
same ranks. Two locks see to it, always taken in this order:

    the engines' turn   a rollout, an evaluation or a weight sync: so a sync waits until nothing is in flight. With partial
                        rollout nobody needs it: requests are paused. On shared GPUs the other models need it too, see ``turns``
    the learners        whatever asks the training ranks, which answer one call at a time: log-probs, updates, checkpoints, and
                        the weight sync, in which they send

A replay, which trains on what another run sampled, has neither engines nor a rollout worker.

Actors outlive a crash of the controller: the next attempt finds them. They go away once the keeper's lease is not renewed.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
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
from rlhf_core.cluster.turns import Turns
from rlhf_core.cluster.wait import all_of
from rlhf_core.errors import DeadlineError, RunFailedError, StorageError, WeightSyncError, WorkerError
from rlhf_core.generation.sleeping import NO_WEIGHTS
from rlhf_core.records import Stage, StageRef
from rlhf_core.telemetry import Stopwatch, get_logger
from rlhf_core.user_file import FROM_FILE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence

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
        self._learners = asyncio.Lock()
        self._turn = asyncio.Lock()  # the engines'
        self._reviving_engines = asyncio.Lock()
        self._reviving_scoring = asyncio.Lock()
        self._scoring_calls = 0  # under way
        self.syncs = 0  # of weights, by this process
        self.sync_seconds = 0.0  # of them all
        self._gpus = Turns(
            self.config,
            engines=lambda: self._engines,
            policy=lambda: self._policy.ranks,
            beside=lambda: [*self._critic.ranks, *self._reference.ranks],
            reward=lambda: self._reward.ranks,
        )

    # --- life ---------------------------------------------------------------------------------------------------------

    async def open(self, plan_steps: Callable[[DataFacts | None], Awaitable[PlannedSteps]]) -> None:
        """Find or make every actor.

        Args:
            plan_steps: told what the prompts are (None: of a replay), answers with the optimizer steps of the whole run, or
                raises.

        Raises:
            DeadlineError: the cluster had no room, or an actor did not start, within ``run.start_timeout``.
            WorkerError: an actor died while starting.
        """
        self._tenure.begin()
        # Always anew: an earlier attempt's would still hold the task and reward files that have been mended since. So would
        # a half dead group of reference ranks hold up the ranks that join it.
        own_loss = FROM_FILE.fullmatch(self.config.actor.policy_loss_type)
        loaded = self._groups.names_of("policy") if own_loss else []
        await self._kill([*LIGHT_WORKERS, *self._groups.names_of("reference"), *loaded])
        await asyncio.to_thread(self._groups.reserve, self.config.run.start_timeout)
        self._rollout = self._groups.actor("rollout") if self._groups.count("rollout") else None
        self._scoring = self._groups.actor("scoring")
        self._engines = [self._groups.actor("engine", index) for index in range(self._groups.count("engine"))]
        for group in (self._policy, self._critic, self._reference, self._reward):
            group.find()
        shared = self._gpus.are_taken
        starts = [self._start_by_turns()] if shared else [self._start_engines(self._engines), self._start_scoring()]
        loading = [asyncio.ensure_future(start) for start in starts]
        try:
            steps = await plan_steps(await self._start_rollout())
            self._policy.total_steps, self._critic.total_steps = steps.policy, steps.critic
            if shared:
                await asyncio.gather(*loading)
            await asyncio.gather(self._policy.begin(), self._critic.begin(), self._reference.start(), *loading)
        finally:
            for task in loading:
                task.cancel()

    async def tidy(self) -> None:
        """Reward processes, shared memory: what would outlive a killed actor."""
        actors = [actor for actor in (*self._engines, self._rollout, self._scoring) if actor is not None]
        await asyncio.gather(*(quietly(actor.shutdown) for actor in actors), self._policy.shutdown())

    # --- versions -----------------------------------------------------------------------------------------------------

    async def heal(self, version: int, work: Callable[[], Awaitable[Any]]) -> Any:
        """Run ``work`` with policy and critic at ``version``, as their only user; where a worker dies, rebuild it and run
        ``work`` again.

        Raises:
            WorkerError: after ``run.max_restarts`` rebuilds.
        """
        async with self._gpus_turn(), self._learners:
            return await super().heal(version, work)

    async def with_engines(self, oldest: int, newest: int, work: Callable[[], Awaitable[Any]]) -> Any:
        """Run ``work`` with rollout worker and engines alive, and each engine at a version from ``oldest`` to ``newest``.

        Where all are, they stay as they are; else each is sent the newest weights that the log has, up to ``newest``.

        Raises:
            WorkerError: after ``run.max_restarts`` rebuilds.
        """
        async with self._engines_turn():
            return await self._healing(lambda: self._ensure_engines(oldest, newest), work)

    async def with_scoring(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Run ``work`` with scoring worker and reward model alive; errors as ``heal``."""
        return await self._healing(self._ensure_scoring, work)

    async def ensure(self, version: int) -> None:
        """All that an update needs alive, policy and critic at ``version``. Hold the learners."""
        await self._ensure_scoring()
        await self._gpus.to_training()
        dead, held = await asyncio.gather(
            any_dead(self._reference.ranks), versions_of([*self._policy.ranks, *self._critic.ranks])
        )
        if not dead and set(held) == {version}:
            return
        if dead:
            await self._reference.replace()
            await self._reference.start()
        await self._policy.ensure(version, self._policy_update)
        await self._critic.ensure(version, self._critic_update)

    async def _ensure_scoring(self) -> None:
        async with self._reviving_scoring:
            # The reward model answers one call at a time: while it scores, whoever waits for that hears of its death.
            if not self._scoring_calls and await self._reward.dead():
                await self._reward.replace()
                await self._kill(["scoring"])  # it knows the old ones
            if await any_dead([self._scoring]):
                await self._kill(["scoring"])
                self._scoring = self._groups.actor("scoring")
                await self._start_scoring()

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

    async def _ensure_engines(self, oldest: int, newest: int) -> None:
        async with self._reviving_engines:
            sampler_died, held = await asyncio.gather(any_dead(self._samplers), versions_of(self._engines))
            if sampler_died:
                await self._kill(["rollout"])
                self._rollout = self._groups.actor("rollout")
                await self._start_rollout()
            dead = [index for index, found in enumerate(held) if found is None or (found < 0 and found != NO_WEIGHTS)]
            if dead:
                await self._gpus.to_engines()  # a new one takes the memory that it finds free
            for index in dead:
                logger.warning("engine %d is dead: making it again", index)
                await self._kill([self._groups.names_of("engine")[index]])
                await asyncio.to_thread(self._groups.reserve, self.config.run.start_timeout)
                self._engines[index] = self._groups.actor("engine", index)
            await self._start_engines([self._engines[index] for index in dead])
            if dead or not all(found is not None and oldest <= found <= newest for found in held):
                await self._send_newest(oldest, newest)
            await self._gpus.to_engines()

    async def _send_newest(self, oldest: int, newest: int) -> None:
        """The newest weights that the log has, up to version ``newest``, to every engine."""
        if not self._engines:
            return
        async with self._learners:
            version = await asyncio.to_thread(self._newest_recorded, newest)
            if version < oldest:
                raise StorageError(
                    f"{self.store.url}: the engines are to speak with version {oldest} or a newer one, and the log ends with "
                    f"version {version}"
                )
            if set(await self._policy.versions()) != {version}:
                await self._gpus.to_training()
                await self._policy.ensure(version, self._policy_update)
            await self.sync(version)

    def _newest_recorded(self, newest: int) -> int:
        """The newest version that the log has, up to ``newest``, which is a few updates ahead of it at most.

        Found from there downwards: a list of all iterations takes a store long, and the engines wait for this.
        """
        return next((v for v in range(newest, 0, -1) if self.store.stage(v - 1, Stage.UPDATE) is not None), 0)

    @asynccontextmanager
    async def _scores(self) -> AsyncIterator[None]:
        async with self._gpus_turn():
            await self._gpus.to_scoring()
            self._scoring_calls += 1
            try:
                yield
            finally:
                self._scoring_calls -= 1

    def _engines_turn(self) -> AbstractAsyncContextManager[Any]:
        return nullcontext() if self.config.pauses_requests else self._turn

    def _gpus_turn(self) -> AbstractAsyncContextManager[Any]:
        """Where models take turns on their GPUs, whoever computes keeps the engines from it."""
        return self._turn if self._gpus.are_taken else nullcontext()

    async def sync(self, version: int) -> None:
        """Hand the policy's weights, at ``version``, to every engine, and check that each stamped them.

        Raises:
            WorkerError: they did not arrive whole, or not within ``vllm.sync_timeout``; with the engine's own text.
        """
        watch = Stopwatch()
        await self._gpus.to_sync()
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
        self.syncs, self.sync_seconds = self.syncs + 1, self.sync_seconds + watch.seconds

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
        async with self._scores():
            call = self._scoring.score.remote(iteration, parts, norm_state, groups)
            scored: Scored = (await self._stage([call], what))[0]
        if scored.failures:
            await self._believe([self._scoring], what)
        return scored

    async def assemble(self, iteration: int, rollout: StageRef, reward: StageRef, kl_coef: float) -> Assembled:
        """Ask every rank for log-probs and values, as far as they are needed, and turn rewards into advantages."""
        asked = [] if self.config.reuses_logprobs else self._policy.ranks
        # Object references: the arrays go from the ranks to the scoring worker, never through this process.
        answers: Answers = {
            "policy": [rank.logprobs.remote(rollout, reward) for rank in asked],
            "reference": [rank.logprobs.remote(rollout, reward) for rank in self._reference.ranks],
            "critic": [rank.values.remote(rollout, reward) for rank in self._critic.ranks],
        }
        what = f"advantages of iteration {iteration}"
        ranks = [*self._policy.ranks, *self._reference.ranks, *self._critic.ranks]
        async with blaming_the_dead(ranks, what), self._leaving_idle():
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
        async with self._leaving_idle():
            shares = await asyncio.gather(self._policy.save(version), self._critic.save(version))
        return [entry for share in shares for entry in share]

    async def answer(self, version: int) -> tuple[tuple[Part, ...], dict[str, float]]:
        """Answer the held-out prompts: shards, and metrics of the rollout."""
        what = f"answers of the evaluation of version {version}"
        parts, metrics = (await self._stage([self._rollout.evaluate.remote(version, self._engines)], what))[0]
        if metrics["rollout/failed"]:
            await self._believe([self._rollout], what)
        return parts, metrics

    async def judge(
        self, version: int, parts: Sequence[Part]
    ) -> tuple[dict[str, float], list[dict[str, Any]], list[dict[str, Any]]]:
        """Score the answers of an evaluation: metrics, a few rows for people, each prompt's outcome."""
        what = f"evaluation of version {version}"
        async with self._scores():
            call = self._scoring.judge.remote(parts, self.config.run.sample_rows)
            metrics, samples, outcomes = (await self._stage([call], what))[0]
        if metrics["eval/failed"]:
            await self._believe([self._scoring], what)
        return metrics, samples, outcomes

    async def samples(self, rollout: StageRef, reward: StageRef, count: int) -> list[dict[str, Any]]:
        """Readable rows of an iteration."""
        return (await self._stage([self._scoring.samples.remote(rollout, reward, count)], "sample answers"))[0]  # type: ignore[no-any-return]

    # --- private ------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _leaving_idle(self) -> AsyncIterator[None]:
        """Within, what fails elsewhere is told once the training ranks have done what they were asked for."""
        try:
            yield
        except (WorkerError, RunFailedError):
            seconds = self.config.run.stage_timeout
            groups = (self._policy, self._critic, self._reference)
            await asyncio.gather(*(group.until_idle(seconds) for group in groups))
            raise

    @property
    def _samplers(self) -> list[Any]:
        """The rollout worker, where there is one."""
        return [] if self._rollout is None else [self._rollout]

    async def _start_rollout(self) -> DataFacts | None:
        """What the prompts are; None without a worker that owns them."""
        facts = await self._starting([worker.start.remote() for worker in self._samplers], "rollout")
        return facts[0] if facts else None

    async def _start_by_turns(self) -> None:
        """On shared GPUs: engines first, alone, for they take the memory that they find free; then room for the others."""
        await self._gpus.to_engines()
        await self._start_engines(self._engines)
        leftovers = [engine.drop_requests.remote() for engine in self._engines]  # of an earlier attempt
        await self._starting(leftovers, "engines")
        await self._gpus.to_scoring()
        await self._start_scoring()
        await self._gpus.to_training()

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
