"""The processes of a supervised run: one group of ranks, at the right version before it is used. See ``session``."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_core.cluster.actor_session import DIGEST, ActorSession
from rlhf_core.cluster.groups import ActorGroups, Member, rank_environment
from rlhf_core.cluster.rank_group import Recorded, TrainedGroup
from rlhf_core.cluster.supervised_worker import SupervisedWorker
from rlhf_core.cluster.wait import one
from rlhf_core.errors import StorageError
from rlhf_core.records import Stage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rlhf_core.cluster.context import SupervisedContext
    from rlhf_core.cluster.placement import Placement
    from rlhf_core.cluster.supervised_worker import ExampleFacts
    from rlhf_core.storage import FileEntry, Lease


@dataclass(frozen=True, slots=True)
class Trained:
    """What an iteration left behind."""

    metrics: dict[str, float]
    digest: str
    optimizer_steps: int  # so far


class SupervisedSession(ActorSession):
    """The processes of a supervised run. ``open`` first.

    Args:
        context: of the run.
        placement: the slot of each rank.
        threads: of each rank on CPU.
        lease: the run's.
    """

    def __init__(self, context: SupervisedContext, placement: Placement, threads: int, lease: Lease) -> None:
        self.config = context.config
        self.store = context.store
        run = self.config.run
        must_match = context.device == "cpu" or self.config.train.full_determinism_enable
        members = {"model": Member(SupervisedWorker, placement.counts["model"], rank_environment(threads))}
        groups = ActorGroups(context, members, placement)
        super().__init__(groups, lease, run)
        self._model = TrainedGroup("model", DIGEST, self.store, must_match, groups, self._tenure, run)

    async def open(self, plan_steps: Callable[[ExampleFacts], Awaitable[int]]) -> None:
        """Find or make the ranks, and load examples and model.

        Args:
            plan_steps: told what the examples are, answers with the optimizer steps of the whole run, or raises.

        Raises:
            DeadlineError: a rank did not start within ``run.start_timeout``.
            WorkerError: a rank died while starting.
        """
        self._tenure.begin()
        limit, what = self.config.run.start_timeout, "reading the examples (run.start_timeout)"
        await asyncio.to_thread(self._groups.reserve, limit)
        self._model.find()
        facts = await one(self._model.ranks[0].load.remote(), limit, what)
        self._model.total_steps = await plan_steps(facts)
        await self._model.begin()

    async def ensure(self, version: int) -> None:
        """Every rank alive, and at ``version``."""
        await self._model.ensure(version, self._update)

    async def tidy(self) -> None:
        """What would outlive a killed rank: nothing so far."""
        await self._model.shutdown()

    async def train(self, iteration: int, first_step: int, steps: int) -> Trained:
        """One iteration: optimizer steps ``first_step …`` of the run."""
        metrics = await self._steps(iteration, first_step, steps)
        return Trained(metrics, await self._model.digest(), await self._model.optimizer_steps())

    async def evaluate(self, version: int) -> dict[str, float]:
        """Metrics of the held-out examples."""
        what = f"evaluation of version {version} (run.stage_timeout)"
        return (await self._model.call("evaluate", what=what))[0]  # type: ignore[no-any-return]

    async def digests(self) -> dict[str, str]:
        """Of the weights."""
        return {DIGEST: await self._model.digest()}

    async def save(self, version: int) -> list[FileEntry]:
        """Every rank writes its part of a checkpoint."""
        return await self._model.save(version)

    async def _update(self, iteration: int) -> Recorded:
        recorded = await asyncio.to_thread(self.store.stage, iteration, Stage.UPDATE)
        if recorded is None:
            raise StorageError(f"{self.store.url}: the log has no iteration {iteration}: cannot restore")
        body = recorded[0].body
        return Recorded(body[DIGEST], lambda: self._steps(iteration, body["first_step"], body["steps"]))

    async def _steps(self, iteration: int, first_step: int, steps: int) -> dict[str, float]:
        what = f"training of iteration {iteration} (run.stage_timeout)"
        return (await self._model.call("train", first_step, steps, what=what))[0]  # type: ignore[no-any-return]
