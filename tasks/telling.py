"""Telling several trackers, each for itself: what one of them does not take, or takes long for, is no matter of the others.

::

    track ─▶ MLflow                    waited for; what it cannot be told now it is told later, and at the end it must be
          ─▶ TensorBoard, W&B, …       beside the run; at the end, and when the run is asked to end before, each is waited for,
                                       and a warning says what it did not take
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlhf_core.errors import RlhfError
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rlhf_core.lineage import Tracker

logger = get_logger(__name__)

REST_SECONDS = 60.0  # before a tracker that did not answer is asked again: its time limits are threads of this process


def tellings_of(tracker: Tracker, metric_trackers: Iterable[Tracker]) -> list[Telling]:
    """One of each; only the first is waited for."""
    return [Telling(tracker, beside=False), *(Telling(other, beside=True) for other in metric_trackers)]


@dataclass(slots=True)
class Telling:
    """One tracker, and what this process has told it. Use from one event loop."""

    tracker: Tracker
    beside: bool  # nobody waits for it, and its failure is a warning
    started: bool = False  # it knows the run
    kept: list[int] | None = None  # the checkpoints that it was told are still there
    _lock: asyncio.Lock = field(
        default_factory=asyncio.Lock
    )  # iterations overlap: the next one would tell the same again
    _task: asyncio.Task[None] | None = None
    _rests_until: float = 0.0  # of the monotonic clock

    async def tell(self, work: Callable[[Telling], None], insist: bool, leaving: bool = False) -> None:
        """Have ``work`` tell it what is new.

        Args:
            work: blocking; called in a thread, never twice at the same time.
            insist: the run is over: wait for it, and what it does not take is an error, unless it stands beside the run.
            leaving: this process leaves the run as it is: wait for it.

        Raises:
            RlhfError: ``work``'s, with ``insist``.
            OSError: as well.
        """
        if not self.beside or insist or leaving:
            await self._tell(work, insist, last=insist or leaving)
        elif (self._task is None or self._task.done()) and time.monotonic() >= self._rests_until:
            self._task = asyncio.create_task(self._tell(work, insist=False, last=False))

    async def tell_failure(self) -> None:
        """The run ends here, for now."""
        try:
            async with self._lock:
                await asyncio.to_thread(self.tracker.finish, succeeded=False)
        except (RlhfError, OSError) as error:
            logger.warning("%s was not told of the failure: %s", self.tracker.name, error)

    async def close(self) -> None:
        """Free what the tracker holds; return once nothing more is told."""
        self.tracker.close()  # first: a call that hangs ends with it
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _tell(self, work: Callable[[Telling], None], insist: bool, last: bool) -> None:
        try:
            async with self._lock:
                await asyncio.to_thread(work, self)
        except (RlhfError, OSError) as error:
            if insist and not self.beside:
                raise
            self.started = not self.beside and self.started  # a new process, a new file: it may have lost its own
            self._rests_until = time.monotonic() + REST_SECONDS
            when = "is not told any more" if last else "will be told later"
            logger.warning("%s %s: %s", self.tracker.name, when, error)
