"""A batch of groups, played at the same time: publishes each as it finishes, stops when failures pile up.

::

    groups of episodes ──▶ run_group (all at once; the engines queue) ──▶ FailureWatch ──▶ GroupPublisher ──▶ shards
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from rlhf_core.agents.episode import run_group
from rlhf_core.agents.publishing import MAX_WAIT_SECONDS
from rlhf_core.errors import RunFailedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rlhf_core.agents.episode import Episode
    from rlhf_core.agents.executor import AgentExecutorBase
    from rlhf_core.agents.publishing import GroupPublisher
    from rlhf_core.records import Trajectory


class FailureWatch:
    """Stops a rollout in which samples fail one after the other, with their reasons."""

    def __init__(self, max_consecutive: int, fail_fast: bool = False) -> None:
        self._limit = 1 if fail_fast else max_consecutive
        self._in_a_row: list[str] = []

    def saw(self, rows: Iterable[Trajectory]) -> None:
        """Count the samples of a finished group.

        Raises:
            RunFailedError: the limit is reached.
        """
        for row in rows:
            if not row.failed:
                self._in_a_row.clear()
                continue
            self._in_a_row.append(row.error or str(row.stop_reason))
            if len(self._in_a_row) >= self._limit:
                reasons = Counter(self._in_a_row).most_common(3)
                listed = "; ".join(f"{count} × {reason}" for reason, count in reasons)
                raise RunFailedError(f"{len(self._in_a_row)} samples failed in a row: {listed}")


async def play(
    executor: AgentExecutorBase,
    groups: Sequence[Sequence[Episode]],
    publisher: GroupPublisher,
    watch: FailureWatch,
) -> list[Trajectory]:
    """Play all groups; each that finished is published, also where another fails.

    Returns:
        All rows, in the order of ``groups``.

    Raises:
        WorkerError: an engine is gone.
        RunFailedError: see ``FailureWatch``.
    """
    tasks = [asyncio.create_task(run_group(executor, group)) for group in groups]
    pending: set[asyncio.Task[list[Trajectory]]] = set(tasks)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, timeout=MAX_WAIT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            finished = [task for task in tasks if task in done]
            await publisher.add([task.result() for task in finished if task.exception() is None])
            for task in finished:
                watch.saw(task.result())
            await publisher.flush_overdue()
    finally:
        for task in pending:
            task.cancel()  # without effect on those that finished meanwhile
        rest = await asyncio.gather(*pending, return_exceptions=True)
        await publisher.add([rows for rows in rest if not isinstance(rows, BaseException)])
        await publisher.flush()
    return [row for task in tasks for row in task.result()]
