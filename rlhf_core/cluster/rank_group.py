"""The processes that hold one model: found or made together, asked together, replaced together.

::

    RankGroup      a model that is only asked: reference, reward model
    TrainedGroup   one that learns: it has a version, and a way back to any version that the log knows

        version k ─▶ newest checkpoint up to k ─▶ recorded updates applied again, digests compared

    Updates of another number of ranks or ZeRO stage come out with other last digits: that is said, and no error.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.cluster.rank_worker import NOT_STARTED, Seat
from rlhf_core.cluster.wait import all_of, one
from rlhf_core.errors import CorruptShardError, DeadlineError, LeaseError, TrainingError, WorkerError
from rlhf_core.storage import CheckpointStore, is_comparable, read_worlds
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from rlhf_core.cluster.groups import ActorGroups
    from rlhf_core.cluster.tenure import Tenure
    from rlhf_core.config.model import RunConfig
    from rlhf_core.storage import FileEntry, RunStore

logger = get_logger(__name__)

# Seconds an idle actor may take to say which version it holds.
PING_SECONDS = 60.0


async def versions_of(actors: Sequence[Any]) -> list[int | None]:
    """The version each holds; None where it is dead or does not answer."""

    async def ask(actor: Any) -> int | None:
        try:
            return int(await one(actor.version.remote(), PING_SECONDS, "version"))
        except (WorkerError, DeadlineError):
            return None

    return list(await asyncio.gather(*(ask(actor) for actor in actors)))


async def any_dead(actors: Sequence[Any]) -> bool:
    """True if one of them does not answer."""
    try:
        await all_of([actor.ping.remote() for actor in actors], PING_SECONDS, "ping")
    except (WorkerError, DeadlineError):
        return True
    return False


@asynccontextmanager
async def blaming_the_dead(actors: Sequence[Any], what: str) -> AsyncIterator[None]:
    """Within, what a rank complains of is the death of a peer, where one has died: who is left is asked.

    Raises:
        WorkerError: a rank died.
    """
    try:
        yield
    except (WorkerError, DeadlineError, LeaseError):
        raise
    except Exception as error:
        if len(actors) > 1 and await any_dead(actors):
            raise WorkerError(f"{what}: a rank died; its peer says: {error}") from error
        raise


class RankGroup:
    """All actors of a role; none, if the run has no such model.

    Args:
        role: in ``groups``.
        groups: finds, makes and ends actors.
        tenure: asked before every act.
        limits: seconds.
        meet: the ranks form one process group: a new one cannot join those that have met.
    """

    def __init__(self, role: str, groups: ActorGroups, tenure: Tenure, limits: RunConfig, *, meet: bool = True) -> None:
        self.role = role
        self.ranks: list[Any] = []
        self._groups, self._tenure, self._limits, self._meet = groups, tenure, limits, meet

    def find(self) -> None:
        """Those that live, and new ones for the others; not started yet."""
        self.ranks = [self._groups.actor(self.role, index) for index in range(self._groups.count(self.role))]

    async def replace(self) -> None:
        """New processes in place of all; not started yet. Where a node died, its slots are on another one first."""
        await self.kill()
        await asyncio.to_thread(self._groups.reserve, self._limits.start_timeout)
        self.find()

    async def kill(self) -> None:
        """End all."""
        self._tenure.check()
        await asyncio.to_thread(self._groups.kill, self._groups.names_of(self.role))

    async def start(self, *arguments: Any) -> list[Any]:
        """Load the model, where it is not loaded. Returns what the ranks answer."""
        if not self.ranks:
            return []
        what = f"start of {self.role} ranks (run.start_timeout)"
        seats: list[tuple[Seat, ...]] = [()] * len(self.ranks)
        if self._meet:
            address, port = await one(self.ranks[0].rendezvous.remote(), self._limits.start_timeout, what)
            seats = [(Seat(rank, len(self.ranks), address, port),) for rank in range(len(self.ranks))]
        calls = [rank.start.remote(*seat, *arguments) for rank, seat in zip(self.ranks, seats, strict=True)]
        return await all_of(calls, self._limits.start_timeout, what)

    async def dead(self) -> bool:
        """True if one of them does not answer."""
        return await any_dead(self.ranks)

    async def until_idle(self, seconds: float) -> None:
        """Return once all have done what they were asked for; or one is dead, for which its peers may wait in vain.

        A busy rank answers no ping: taken for dead, it would be made again, and every update since the newest checkpoint too.
        """
        with contextlib.suppress(WorkerError, DeadlineError):
            await all_of([rank.ping.remote() for rank in self.ranks], seconds, "ping")

    async def call(self, method: str, *arguments: Any, what: str, seconds: float | None = None) -> list[Any]:
        """A method of every rank, at the same time.

        Raises:
            WorkerError: a rank died.
            DeadlineError: no answer within ``seconds`` (default: ``run.stage_timeout``).
        """
        self._tenure.check()
        limit = self._limits.stage_timeout if seconds is None else seconds
        async with blaming_the_dead(self.ranks, what):
            return await all_of([getattr(rank, method).remote(*arguments) for rank in self.ranks], limit, what)


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the log says of one update."""

    digest: str
    apply: Callable[[], Awaitable[Any]]  # do it again


class TrainedGroup(RankGroup):
    """The ranks of a model that learns.

    Args:
        role: see ``RankGroup``.
        digest_key: of the weights' digest, in the records of updates and checkpoints.
        store: the run's log.
        must_match: weights must be those of the log, bit for bit: the kernels promise it. Elsewhere it is only reported.
        groups: see ``RankGroup``.
        tenure: see ``RankGroup``.
        limits: see ``RankGroup``.
    """

    def __init__(
        self,
        role: str,
        digest_key: str,
        store: RunStore,
        must_match: bool,
        groups: ActorGroups,
        tenure: Tenure,
        limits: RunConfig,
    ) -> None:
        super().__init__(role, groups, tenure, limits)
        self.digest_key = digest_key
        self.total_steps = 0
        self._checkpoints = CheckpointStore(store)
        self._must_match = must_match

    async def versions(self) -> list[int | None]:
        """The version each holds; None where it is dead."""
        return await versions_of(self.ranks)

    async def begin(self) -> None:
        """Load the model as it was before training, where none is loaded."""
        await self.until_idle(self._limits.start_timeout)  # with what an earlier attempt asked for
        held = set(await self.versions())
        if len(held) > 1 and held & {None, NOT_STARTED}:
            # Some ranks of an earlier attempt live: they will not join again, and the new ones would wait for them.
            await self.replace()
        await self.start(self.total_steps)

    async def ensure(self, version: int, recorded: Callable[[int], Awaitable[Recorded]]) -> None:
        """Every rank alive and at ``version``.

        Args:
            version: as many updates as the log says.
            recorded: the update of an iteration.
        """
        held = set(await self.versions())
        if held <= {version}:  # none at all: the run has no such model
            return
        if held != {0}:
            # Dead, half updated, or ahead of the log because its update was never recorded: begin again.
            logger.warning("%s ranks hold versions %s, the log says %d: rebuilding them", self.role, held, version)
            await self._begin_again()
        base = await self._load_checkpoint(version)
        worlds = await asyncio.to_thread(read_worlds, self._checkpoints.run_store)
        comparable = True
        for iteration in range(base, version):
            update = await recorded(iteration)
            await update.apply()
            comparable = comparable and is_comparable(worlds, iteration)
            what = f"applying iteration {iteration} again"
            if comparable:
                self._compare(await self.digest(), update.digest, what, self._must_match)
            else:
                self._tell_apart(await self.digest(), update.digest, what)
        if version:
            logger.info(
                "%s restored to version %d: checkpoint %d and %d updates", self.role, version, base, version - base
            )

    async def digest(self) -> str:
        """Of the weights, the same on every rank."""
        digests = await self.call("digest", what=f"digest of the {self.role}'s weights")
        if len(set(digests)) != 1:
            raise TrainingError(f"the {self.role}'s ranks hold different weights")
        return str(digests[0])

    async def optimizer_steps(self) -> int:
        """Optimizer steps taken."""
        return int((await self.call("optimizer_steps", what="optimizer steps"))[0])

    async def save(self, version: int) -> list[FileEntry]:
        """Every rank writes its part of a checkpoint."""
        shares = await self.call("save", version, what=f"checkpoint {version} of the {self.role}")
        return [entry for share in shares for entry in share]

    async def shutdown(self) -> None:
        """Ask every rank to leave nothing behind; those that do not answer are let be."""
        await asyncio.gather(*(quietly(rank.shutdown) for rank in self.ranks))

    async def _begin_again(self) -> None:
        await self.replace()
        await self.begin()

    async def _load_checkpoint(self, version: int) -> int:
        """Load the newest whole checkpoint up to ``version``; 0, where training began, without one."""
        up_to = version
        while (found := await asyncio.to_thread(self._checkpoints.newest, up_to)) is not None:
            base, body = found
            try:
                await self.call("restore", base, what=f"restoring checkpoint {base}")
            except CorruptShardError as error:
                logger.warning("checkpoint passed over: %s", error)
                await self._begin_again()  # whatever it holds now
                up_to = base - 1
                continue
            # The same numbers, whatever the device and however many ranks they are spread over.
            self._compare(await self.digest(), body[self.digest_key], f"checkpoint {base}", must_match=True)
            return base
        return 0

    def _compare(self, digest: str, recorded: str, what: str, must_match: bool) -> None:
        if digest == recorded:
            return
        message = (
            f"{what} gave the {self.role} weights {digest[:12]}, the log says {recorded[:12]}: the code, a library, the "
            "machine or its number of threads differs from the one that trained"
        )
        if must_match:
            raise TrainingError(message)
        logger.warning("%s; or the GPU's kernels are not deterministic (train.full_determinism_enable)", message)

    def _tell_apart(self, digest: str, recorded: str, what: str) -> None:
        if digest == recorded:
            return
        logger.warning(
            "%s on other ranks, or with another ZeRO stage, than when it was recorded: the %s weights are %s, the log says %s",
            what,
            self.role,
            digest[:12],
            recorded[:12],
        )


async def quietly(method: Any) -> None:
    """A remote call whose failure changes nothing."""
    try:
        await one(method.remote(), PING_SECONDS, "shutdown")
    except (WorkerError, DeadlineError) as error:
        logger.info("an actor did not shut down by itself: %s", error)
