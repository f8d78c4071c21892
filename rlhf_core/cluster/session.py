"""The processes of a run: found or made, healthy, and at the right policy version before they are used.

::

    open ──▶ lease ──▶ actors (found by name, or made) ──▶ ensure(version) ──▶ stage calls … ──▶ close
                                                             │
              policy at another version, or a rank dead ─────┤ newest checkpoint + recorded updates, digests checked
              engine dead, or at another version ────────────┘ made again, weights synced

Actors outlive a crash of the controller: the next attempt finds them. They go away once the keeper's lease is not renewed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

from rlhf_core.cluster.placement import LIGHT_WORKERS
from rlhf_core.cluster.trainer_worker import Seat
from rlhf_core.cluster.wait import all_of, one
from rlhf_core.errors import (
    CorruptShardError,
    DeadlineError,
    LeaseError,
    StorageError,
    TrainingError,
    WeightSyncError,
    WorkerError,
)
from rlhf_core.records import Stage, StageRef
from rlhf_core.storage import CheckpointStore
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from rlhf_core.cluster.context import WorkerContext
    from rlhf_core.cluster.groups import ActorGroups
    from rlhf_core.cluster.rollout_worker import DataFacts, RolloutOutcome
    from rlhf_core.cluster.scoring_worker import Assembled, Scored
    from rlhf_core.records import Part, PromptCursor
    from rlhf_core.storage import FileEntry, Lease, RunStore

logger = get_logger(__name__)

# Seconds an idle actor may take to say which version it holds.
PING_SECONDS = 60.0


class RunSession:
    """Use from one event loop. ``open`` first, ``close`` in any case."""

    def __init__(self, context: WorkerContext, groups: ActorGroups, lease: Lease) -> None:
        self.context = context
        self.config = context.config
        self.store: RunStore = context.store
        self.total_steps = 0
        self._groups = groups
        self._lease = lease
        self._rollout: Any = None
        self._scoring: Any = None
        self._engines: list[Any] = []
        self._policy: list[Any] = []
        self._reference: list[Any] = []
        self._renewal: asyncio.Task[None] | None = None  # ended by close()
        self._closing = asyncio.Event()
        self._healing = asyncio.Lock()

    # --- life ---------------------------------------------------------------------------------------------------------

    async def open(self, plan_steps: Callable[[DataFacts], Awaitable[int]]) -> DataFacts:
        """Find or make every actor.

        Args:
            plan_steps: told what the prompts are, answers with the optimizer steps of the whole run (the learning rate
                depends on them) or raises.

        Raises:
            DeadlineError: an actor did not start within ``run.start_timeout``.
            WorkerError: an actor died while starting.
        """
        self._keeper = self._groups.keeper(self.config.run.lease_seconds)
        self._renewal = asyncio.create_task(self._renew_forever())
        # Always anew: an earlier attempt's would still hold the task and reward files that have been mended since. So would
        # a half dead group of reference ranks hold up the ranks that join it.
        await self._kill([*LIGHT_WORKERS, *self._groups.reference_names])
        self._rollout = self._groups.rollout()
        self._scoring = self._groups.scoring()
        self._engines = [self._groups.engine(i) for i in range(self._groups.num_engines)]
        self._policy = [self._groups.policy(i) for i in range(self._groups.num_policy)]
        self._reference = [self._groups.reference(i) for i in range(self._groups.num_reference)]
        engines = asyncio.ensure_future(self._start_engines(self._engines))
        try:
            facts, _ = await self._starting(
                [self._rollout.start.remote(), self._scoring.start.remote()], "rollout and scoring"
            )
            self.total_steps = await plan_steps(facts)
            await asyncio.gather(self._start_policy(), self._start_reference(), engines)
        finally:
            engines.cancel()
        return facts  # type: ignore[no-any-return]

    async def close(self, keep_actors: bool) -> None:
        """Give the run back. With ``keep_actors`` the next attempt finds them, until the keeper's lease ends."""
        if not keep_actors:
            # Reward processes, shared memory: what would outlive a killed actor.
            tidy = [a for a in (*self._engines, *self._policy, self._scoring) if a is not None]
            await asyncio.gather(*(self._quietly(actor.shutdown) for actor in tidy))
            await self.discard_actors()
        await self._stop_renewing()
        await asyncio.to_thread(self._lease.release)

    async def discard_actors(self) -> None:
        """End every actor; ``open`` makes new ones."""
        await self._stop_renewing()
        await asyncio.to_thread(self._groups.kill, [*self._groups.names, "keeper"])

    async def _stop_renewing(self) -> None:
        """Let a renewal under way end: cancelled, it would go on in its thread and race with the release."""
        if self._renewal is not None:
            self._closing.set()
            await asyncio.gather(self._renewal, return_exceptions=True)
            self._renewal = None
            self._closing.clear()

    async def heal(self, version: int, work: Callable[[], Awaitable[Any]]) -> Any:
        """Run ``work`` with every actor at ``version``; where a worker dies, rebuild it and run ``work`` again.

        Raises:
            WorkerError: after ``run.max_restarts`` rebuilds.
        """
        for restart in range(self.config.run.max_restarts + 1):
            try:
                self.check_lease()
                await self.ensure(version)
                return await work()
            except WorkerError as error:
                if restart == self.config.run.max_restarts:
                    raise
                logger.warning("rebuilding workers (%d of %d): %s", restart + 1, self.config.run.max_restarts, error)
        raise AssertionError("unreachable")

    # --- versions -----------------------------------------------------------------------------------------------------

    async def ensure(self, version: int) -> None:
        """Every actor alive, policy and engines at ``version``."""
        async with self._healing:
            if await self._is_ready(version):
                return
            await self._ensure_light()
            await self._ensure_policy(version)
            await self._ensure_engines(version)

    async def _is_ready(self, version: int) -> bool:
        """True if nothing is to be done: all are asked at once."""
        dead, held = await asyncio.gather(
            self._dead([self._rollout, self._scoring, *self._reference]),
            self._versions([*self._policy, *self._engines]),
        )
        return not dead and set(held) == {version}

    async def _ensure_light(self) -> None:
        if await self._dead([self._rollout]):
            await self._kill(["rollout"])
            self._rollout = self._groups.rollout()
            await self._starting([self._rollout.start.remote()], "rollout")
        if await self._dead([self._scoring]):
            await self._kill(["scoring"])
            self._scoring = self._groups.scoring()
            await self._starting([self._scoring.start.remote()], "scoring")
        if self._reference and await self._dead(self._reference):
            await self._kill(self._groups.reference_names)
            self._reference = [self._groups.reference(i) for i in range(self._groups.num_reference)]
            await self._start_reference()

    async def _ensure_policy(self, version: int) -> None:
        held = await self._versions(self._policy)
        if set(held) == {version}:
            return
        if set(held) != {0}:
            # Dead, half updated, or ahead of the log because its update was never recorded: begin again.
            logger.warning("policy ranks hold versions %s, the log says %d: rebuilding them", held, version)
            await self._remake_policy()
        await self._restore(version)

    async def _remake_policy(self) -> None:
        await self._replace_policy()
        await self._start_policy()

    async def _replace_policy(self) -> None:
        """New processes in place of the policy's ranks, not started yet."""
        await self._kill(self._groups.policy_names)
        self._policy = [self._groups.policy(i) for i in range(self._groups.num_policy)]

    async def _restore(self, version: int) -> None:
        """From the start of training to ``version``: newest checkpoint, then the recorded updates, digests checked."""
        base = await self._load_checkpoint(version)
        for iteration in range(base, version):
            await self._apply_again(iteration)
        if version:
            logger.info("policy restored to version %d: checkpoint %d and %d updates", version, base, version - base)

    async def _load_checkpoint(self, version: int) -> int:
        """Load the newest whole checkpoint up to ``version``; 0, where training began, without one."""
        checkpoints, up_to = CheckpointStore(self.store), version
        while (found := await asyncio.to_thread(checkpoints.newest, up_to)) is not None:
            base, body = found
            try:
                await self._ranks([rank.restore.remote(base) for rank in self._policy], f"restoring checkpoint {base}")
            except CorruptShardError as error:
                logger.warning("checkpoint passed over: %s", error)
                await self._remake_policy()  # whatever it holds now
                up_to = base - 1
                continue
            self._compare(await self.digest(), body["digest"], f"checkpoint {base}")
            return base
        return 0

    async def _apply_again(self, iteration: int) -> None:
        recorded = await asyncio.to_thread(self.store.stage, iteration, Stage.UPDATE)
        experience = await asyncio.to_thread(self.store.stage, iteration, Stage.EXPERIENCE)
        if recorded is None or experience is None:
            raise StorageError(
                f"{self.store.url}: the log has no complete update of iteration {iteration}: cannot restore"
            )
        body = recorded[0].body
        _, digest, _ = await self.update(iteration, experience[1], body["kl_coef"])
        self._compare(digest, body["digest"], f"applying iteration {iteration} again")

    def _compare(self, digest: str, recorded: str, what: str) -> None:
        """Weights must be those of the log, bit for bit, where the kernels promise it; elsewhere that is only reported."""
        if digest == recorded:
            return
        message = (
            f"{what} gave weights {digest[:12]}, the log says {recorded[:12]}: the code, a library, the machine or its "
            "number of threads differs from the one that trained"
        )
        if self.context.device == "cpu" or self.config.train.full_determinism_enable:
            raise TrainingError(message)
        logger.warning("%s; or the GPU's kernels are not deterministic (train.full_determinism_enable)", message)

    async def _ensure_engines(self, version: int) -> None:
        held = await self._versions(self._engines)
        for index, found in enumerate(held):
            if found is None or found < 0:
                logger.warning("engine %d is dead: making it again", index)
                await self._kill([f"engine-{index}"])
                self._engines[index] = self._groups.engine(index)
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
            await self._ranks([rank.sync.remote(self._engines, seconds) for rank in self._policy], what, seconds)
        except (WeightSyncError, DeadlineError) as error:
            # The engine refuses to speak with damaged weights, or does not answer: it is made again.
            raise WorkerError(str(error)) from error
        held = await self._versions(self._engines)
        if set(held) != {version}:
            raise WorkerError(f"after a weight sync the engines hold versions {held}, not {version}")

    # --- stages -------------------------------------------------------------------------------------------------------

    async def rollout(self, iteration: int, version: int, cursor: PromptCursor) -> RolloutOutcome:
        """Sample a batch."""
        call = self._rollout.rollout.remote(iteration, version, cursor, self._engines)
        return (await self._stage([call], f"rollout of iteration {iteration}"))[0]  # type: ignore[no-any-return]

    async def score(self, iteration: int, rollout: StageRef) -> Scored:
        """Score a batch."""
        call = self._scoring.score.remote(iteration, rollout)
        return (await self._stage([call], f"rewards of iteration {iteration}"))[0]  # type: ignore[no-any-return]

    async def assemble(
        self, iteration: int, rollout: StageRef, reward: StageRef, drawn: int, kl_coef: float
    ) -> Assembled:
        """Recompute log-probs on every rank, and turn rewards into advantages."""
        # Object references: the arrays go from the ranks to the scoring worker, never through this process.
        policy = [rank.logprobs.remote(rollout, reward) for rank in self._policy]
        reference = [rank.logprobs.remote(rollout, reward) for rank in self._reference]
        call = self._scoring.assemble.remote(iteration, rollout, reward, drawn, kl_coef, policy, reference)
        return (await self._stage([call], f"advantages of iteration {iteration}"))[0]  # type: ignore[no-any-return]

    async def update(self, iteration: int, experience: StageRef, kl_coef: float) -> tuple[dict[str, float], str, int]:
        """One update of the policy. Returns its metrics, the digest of the weights and the optimizer steps so far."""
        what = f"update of iteration {iteration}"
        reports = await self._ranks([rank.update.remote(iteration, experience, kl_coef) for rank in self._policy], what)
        steps = await self._stage([self._policy[0].optimizer_steps.remote()], what)
        return reports[0], await self.digest(), steps[0]

    async def digest(self) -> str:
        """Of the policy's weights, the same on every rank."""
        digests = await self._ranks([rank.digest.remote() for rank in self._policy], "digest of the weights")
        if len(set(digests)) != 1:
            raise TrainingError("the policy's ranks hold different weights")
        return str(digests[0])

    async def save(self, version: int) -> list[FileEntry]:
        """Every rank writes its part of a checkpoint."""
        shares = await self._ranks([rank.save.remote(version) for rank in self._policy], f"checkpoint {version}")
        return [entry for share in shares for entry in share]

    async def evaluate(self, version: int) -> tuple[tuple[Part, ...], dict[str, float], list[dict[str, Any]]]:
        """Answer the held-out prompts and score the answers: shards, metrics, and a few rows for people."""
        what = f"evaluation of version {version}"
        parts, rollout = (await self._stage([self._rollout.evaluate.remote(version, self._engines)], what))[0]
        rows = self.config.run.sample_rows
        metrics, samples = (await self._stage([self._scoring.judge.remote(parts, rows)], what))[0]
        return parts, {**metrics, "eval/seconds": rollout["rollout/seconds"]}, samples

    async def samples(self, rollout: StageRef, reward: StageRef, count: int) -> list[dict[str, Any]]:
        """Readable rows of an iteration."""
        return (await self._stage([self._scoring.samples.remote(rollout, reward, count)], "sample answers"))[0]  # type: ignore[no-any-return]

    # --- private ------------------------------------------------------------------------------------------------------

    async def _start_engines(self, engines: Sequence[Any]) -> None:
        await self._starting([engine.start.remote() for engine in engines], "engines")

    async def _start_policy(self) -> None:
        held = set(await self._versions(self._policy))
        if len(held) > 1 and held & {None, -1}:
            # Some ranks of an earlier attempt live: they will not join again, and the new ones would wait for them.
            await self._replace_policy()
        seats = await self._seats(self._policy)
        calls = [worker.start.remote(seat, self.total_steps) for worker, seat in zip(self._policy, seats, strict=True)]
        await self._starting(calls, "policy ranks")

    async def _start_reference(self) -> None:
        seats = await self._seats(self._reference)
        calls = [worker.start.remote(seat) for worker, seat in zip(self._reference, seats, strict=True)]
        await self._starting(calls, "reference ranks")

    async def _seats(self, group: Sequence[Any]) -> list[Seat]:
        if not group:
            return []
        ((address, port),) = await self._starting([group[0].rendezvous.remote()], "rank 0")
        return [Seat(rank, len(group), address, port) for rank in range(len(group))]

    async def _starting(self, calls: Sequence[Any], what: str) -> list[Any]:
        return await all_of(calls, self.config.run.start_timeout, f"start of {what} (run.start_timeout)")

    async def _stage(self, calls: Sequence[Any], what: str) -> list[Any]:
        self.check_lease()
        return await all_of(calls, self.config.run.stage_timeout, f"{what} (run.stage_timeout)")

    async def _ranks(self, calls: Sequence[Any], what: str, seconds: float | None = None) -> list[Any]:
        """A call of every policy rank. Where one dies its peers may complain first: ask who is left before believing them."""
        self.check_lease()
        limit = self.config.run.stage_timeout if seconds is None else seconds
        try:
            return await all_of(calls, limit, what)
        except (WorkerError, DeadlineError, LeaseError):
            raise
        except Exception as error:
            if len(self._policy) > 1 and await self._dead(self._policy):
                raise WorkerError(f"{what}: a rank died; its peer says: {error}") from error
            raise

    async def _kill(self, names: Sequence[str]) -> None:
        self.check_lease()
        await asyncio.to_thread(self._groups.kill, list(names))

    async def _versions(self, actors: Sequence[Any]) -> list[int | None]:
        """The version each holds; None where it is dead or does not answer."""

        async def ask(actor: Any) -> int | None:
            try:
                return int(await one(actor.version.remote(), PING_SECONDS, "version"))
            except (WorkerError, DeadlineError):
                return None

        return list(await asyncio.gather(*(ask(actor) for actor in actors)))

    async def _dead(self, actors: Sequence[Any]) -> bool:
        try:
            await all_of([actor.ping.remote() for actor in actors], PING_SECONDS, "ping")
        except (WorkerError, DeadlineError):
            return True
        return False

    async def _quietly(self, method: Any) -> None:
        try:
            await one(method.remote(), PING_SECONDS, "shutdown")
        except (WorkerError, DeadlineError) as error:
            logger.info("an actor did not shut down by itself: %s", error)

    def check_lease(self) -> None:
        """Return if this process is still the run's one writer. Called before anything is killed, started or committed.

        Raises:
            LeaseError: another process may work on the run by now.
        """
        run_id = self.context.run_id
        if self._renewal is not None and self._renewal.done() and not self._renewal.cancelled():
            error = self._renewal.exception()
            raise LeaseError(f"the lease of run {run_id} is lost: {error}") from error
        if time.time() > self._lease.expires_at:
            raise LeaseError(
                f"the lease of run {run_id} has expired: the store did not take a renewal for {self._lease.seconds:g} s "
                "(run.lease_seconds); start the run again"
            )

    async def _renew_forever(self) -> None:
        """Renew both leases a few times per term; a store that is away for less than a term is survived."""
        seconds = self.config.run.lease_seconds
        while not self._closing.is_set():
            done = await asyncio.gather(
                asyncio.to_thread(self._lease.renew),
                one(self._keeper.renew.remote(self._groups.names), seconds, "keeper"),  # a slow store kills no workers
                return_exceptions=True,
            )
            for error in done:
                if isinstance(error, WorkerError):
                    self._keeper = self._groups.keeper(seconds)
                if isinstance(error, StorageError | WorkerError | DeadlineError):
                    logger.warning("lease of run %s not renewed: %s", self.context.run_id, error)
                elif isinstance(error, BaseException):
                    raise error
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), seconds / 4)


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))
