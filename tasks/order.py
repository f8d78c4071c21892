"""In which order the steps of overlapping iterations come.

::

    Q = train.async_queue_size                     waits for
    rollout k                                      rollout k-1; version k-Q on the engines, and evaluated if that is due
    reward k                                       reward k-1
    advantage k                                    update k-1
    update k                                       version k saved, if that is due: its weights are there no longer afterwards
    weight sync, evaluation, checkpoint of k+1     each other, in this order

The flow run of an iteration begins one rollout ahead of its turn, so that the engines do not idle while Prefect makes it; one
that fills its batch in rounds waits for its turn, because the data may end before it.

So updates come in order, no rollout is more than Q versions behind (back-pressure: it waits), and an evaluation and the
checkpoint that follows from it are of one version. A batch that is filled in rounds is scored while it is sampled: its rollout
waits for reward k-1 as well.

Steps that ended before this process began are not waited for: the log has them. Once a run is asked to end, none begins.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import TYPE_CHECKING

from rlhf_core.errors import RunStoppedError
from rlhf_core.telemetry import at

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from rlhf_core.config import Config


class Step(StrEnum):
    """A step of an iteration. What is done with a version is a step of the iteration that made it."""

    ROLLOUT = "rollout"
    REWARD = "reward"
    ADVANTAGE = "advantage"
    UPDATE = "update"
    PUBLISH = "publish"  # the new version is on the engines, and evaluated
    SAVE = "save"  # and has its checkpoint


class StepOrder:
    """What the iterations of one process wait for of each other. Use from one event loop."""

    def __init__(self, config: Config) -> None:
        self._lag = config.rollout_lag
        self._scores_in_rollout = config.fills_batches
        self.stopped = False
        self._first: int | None = None
        self._done: dict[tuple[Step, int], asyncio.Event] = {}

    def begin(self, iteration: int) -> None:
        """All iterations before this one are over, by the log. The first who says so counts: a run, or one iteration alone."""
        if self._first is None:
            self._first = iteration

    def stop(self) -> None:
        """No step begins any more; who waits for his turn is told."""
        self.stopped = True
        for event in self._done.values():
            event.set()

    async def may_begin(self, iteration: int) -> None:
        """Return once the flow run of an iteration may begin: back-pressure. At once if the run is asked to end."""
        await self._all(self._before(Step.ROLLOUT, iteration if self._scores_in_rollout else iteration - 1))

    @asynccontextmanager
    async def step(self, step: Step, iteration: int) -> AsyncIterator[None]:
        """Around a step: it begins when it may, and others may go on once it has ended well.

        Raises:
            RunStoppedError: the run is asked to end.
        """
        await self._all(self._before(step, iteration))
        if self.stopped:
            raise RunStoppedError(f"asked to end before {step} {iteration}")
        with at(iteration=iteration):  # of the log's lines
            yield
        self._event(step, iteration).set()
        if step is Step.SAVE:
            self._forget(iteration)

    def _before(self, step: Step, iteration: int) -> Iterable[tuple[Step, int]]:
        match step:
            case Step.ROLLOUT:
                yield Step.ROLLOUT, iteration - 1
                yield Step.PUBLISH, iteration - 1 - self._lag  # which makes version iteration - lag
                if self._scores_in_rollout:
                    yield Step.REWARD, iteration - 1
            case Step.REWARD:
                yield Step.REWARD, iteration - 1
            case Step.ADVANTAGE:
                yield Step.UPDATE, iteration - 1
            case Step.UPDATE:
                yield Step.SAVE, iteration - 1
            case Step.PUBLISH | Step.SAVE:
                return

    def _forget(self, iteration: int) -> None:
        """It is over, as all before it are: updates come in order. A run may have any number of iterations."""
        self._first = max(self._first or 0, iteration + 1)
        for step in Step:
            self._done.pop((step, iteration), None)

    async def _all(self, steps: Iterable[tuple[Step, int]]) -> None:
        for step, iteration in steps:
            if iteration >= (self._first or 0) and not self.stopped:
                await self._event(step, iteration).wait()

    def _event(self, step: Step, iteration: int) -> asyncio.Event:
        return self._done.setdefault((step, iteration), asyncio.Event())
