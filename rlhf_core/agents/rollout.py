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
from rlhf_core.records import episodes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rlhf_core.agents.episode import Episode
    from rlhf_core.agents.executor import AgentExecutorBase
    from rlhf_core.agents.publishing import GroupPublisher
    from rlhf_core.records import Trajectory


class FailureWatch:
    """Stops a rollout in which samples fail one after the other, with their reasons.

    In a row are those that were drawn one after the other, whichever finished first: what fails fails early, and where a
    quarter of the environments crash at once the first to finish are all failures. A group that still plays ends a row.
    """

    def __init__(self, max_consecutive: int, fail_fast: bool = False) -> None:
        self._limit = 1 if fail_fast else max_consecutive
        self._reasons: dict[int, list[str | None]] = {}  # number of a group -> of each sample; None: it did not fail

    def saw(self, rows: Iterable[Trajectory], number: int | None = None) -> None:
        """Take note of the samples of a finished group; one of several segments is one.

        Args:
            rows: of the group.
            number: its place in the order in which groups were drawn; default: behind those seen so far.

        Raises:
            RunFailedError: the limit is reached.
        """
        number = len(self._reasons) if number is None else number
        self._reasons[number] = [
            (episode.error or str(episode.stop_reason)) if episode.failed else None for episode in episodes_of(rows)
        ]
        first = number  # where a row that reaches into this group may begin
        while (before := self._reasons.get(first - 1)) is not None:
            first -= 1
            if None in before:
                break
        in_a_row: list[str] = []
        for reason in self._from(first):
            if reason is None:
                in_a_row.clear()
                continue
            in_a_row.append(reason)
            if len(in_a_row) >= self._limit:
                reasons = Counter(in_a_row).most_common(3)
                listed = "; ".join(f"{count} × {why}" for why, count in reasons)
                raise RunFailedError(f"{len(in_a_row)} samples failed in a row: {listed}")

    def _from(self, number: int) -> Iterator[str | None]:
        """What is known of the samples from this group on, as far as no group is missing."""
        while number in self._reasons:
            yield from self._reasons[number]
            number += 1


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
            finished = [(number, task) for number, task in enumerate(tasks) if task in done]
            await publisher.add([task.result() for _, task in finished if task.exception() is None])
            for number, task in finished:
                watch.saw(task.result(), number)
            await publisher.flush_overdue()
    finally:
        for task in pending:
            task.cancel()  # without effect on those that finished meanwhile
        rest = await asyncio.gather(*pending, return_exceptions=True)
        await publisher.add([rows for rows in rest if not isinstance(rows, BaseException)])
        await publisher.flush()
    return [row for task in tasks for row in task.result()]
