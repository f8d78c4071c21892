"""Groups that are played at the same time: each is published as it finishes, and all end when failures pile up.

::

    groups of episodes ──begin──▶ run_group (all at once; the engines queue) ──finish──▶ GroupPublisher ──▶ shards
                                      │          ▲                               └─▶ FailureWatch
                                      └─ not awaited: goes on until the next finish
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_core.agents.episode import run_group
from rlhf_core.agents.publishing import MAX_WAIT_SECONDS
from rlhf_core.errors import RunFailedError, WorkerError
from rlhf_core.records import OpenGroup, episodes_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

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

    def forget(self, before: int) -> None:
        """Groups that no row can reach any more, where all before this number have been seen."""
        for number in [number for number in self._reasons if number < before - self._limit]:
            del self._reasons[number]

    def _from(self, number: int) -> Iterator[str | None]:
        """What is known of the samples from this group on, as far as no group is missing."""
        while number in self._reasons:
            yield from self._reasons[number]
            number += 1


@dataclass(frozen=True, slots=True)
class _InPlay:
    number: int  # in the order in which groups were begun
    iteration: int  # in which it was begun
    since: int  # version of the policy then
    task: asyncio.Task[list[Trajectory]]


class GroupsInPlay:
    """Groups that are played at the same time, from one ``finish`` to the next where not all are awaited.

    What finishes meanwhile waits in memory for the next ``finish``, which publishes it first.
    """

    def __init__(self, executor: AgentExecutorBase, watch: FailureWatch) -> None:
        self._executor = executor
        self._watch = watch
        self._begun = 0
        self._open: dict[str, _InPlay] = {}  # by group, as they were begun; the tasks end with ``end``

    @property
    def begun_in(self) -> dict[str, int]:
        """The groups in play, and the iteration in which each was begun."""
        return {group_id: group.iteration for group_id, group in self._open.items()}

    @property
    def unfinished(self) -> tuple[OpenGroup, ...]:
        """The groups in play, as a log names them."""
        return tuple(OpenGroup(group_id, group.since) for group_id, group in self._open.items())

    @property
    def running(self) -> list[str]:
        """Those whose rows are not there yet."""
        return [group_id for group_id, group in self._open.items() if not group.task.done()]

    @property
    def lost(self) -> list[str]:
        """Those whose engine died while nobody waited for them."""
        return [group_id for group_id, group in self._open.items() if _is_lost(group.task)]

    def begin(self, episodes: Sequence[Episode], since: int = 0) -> None:
        """Play one more group.

        Args:
            episodes: its samples.
            since: the oldest version of the policy that may speak in it.
        """
        task = asyncio.create_task(run_group(self._executor, episodes))
        self._open[episodes[0].group_id] = _InPlay(self._begun, episodes[0].iteration, since, task)
        self._begun += 1

    async def finish(
        self, publisher: GroupPublisher, wanted: int | None = None, surely: Collection[str] = ()
    ) -> list[Trajectory]:
        """Publish groups as they finish, until enough have. Where one fails for good all end, and what had finished is kept.

        Args:
            publisher: of this call.
            wanted: return once so many have finished, and let the others go on; None: all.
            surely: groups that are waited for in any case.

        Returns:
            The rows of those that finished, in the order in which they were begun.

        Raises:
            WorkerError: an engine is gone.
            RunFailedError: see ``FailureWatch``.
        """
        rows: dict[int, list[Trajectory]] = {}  # number -> of that group
        through = False
        try:
            while self._open and (wanted is None or len(rows) < wanted or any(g in self._open for g in surely)):
                playing = [group.task for group in self._open.values()]
                await asyncio.wait(playing, timeout=MAX_WAIT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                ended = [self._open.pop(group_id) for group_id in list(self._open) if self._open[group_id].task.done()]
                await publisher.add([group.task.result() for group in ended if group.task.exception() is None])
                for group in ended:
                    rows[group.number] = group.task.result()
                    self._watch.saw(rows[group.number], group.number)
                await publisher.flush_overdue()
            through = True
        finally:
            if not through:
                await publisher.add(await self.end())
            await publisher.flush()
        self._watch.forget(min((group.number for group in self._open.values()), default=self._begun))
        return [row for number in sorted(rows) for row in rows[number]]

    async def end(self, group_ids: Collection[str] | None = None) -> list[list[Trajectory]]:
        """Cancel these groups, by default all, and wait until they have let go of engines and environments.

        Returns:
            Rows of groups that had finished by then.
        """
        named = list(self._open) if group_ids is None else [name for name in group_ids if name in self._open]
        tasks = [self._open.pop(group_id).task for group_id in named]
        for task in tasks:
            task.cancel()  # without effect on those that have finished
        rest = await asyncio.gather(*tasks, return_exceptions=True)
        return [rows for rows in rest if not isinstance(rows, BaseException)]


async def play(
    executor: AgentExecutorBase,
    groups: Sequence[Sequence[Episode]],
    publisher: GroupPublisher,
    watch: FailureWatch,
) -> list[Trajectory]:
    """Play all groups; each that finished is published, also where another fails. Answers as ``GroupsInPlay.finish``."""
    in_play = GroupsInPlay(executor, watch)
    for group in groups:
        in_play.begin(group)
    return await in_play.finish(publisher)


def _is_lost(task: asyncio.Task[list[Trajectory]]) -> bool:
    return task.done() and (task.cancelled() or isinstance(task.exception(), WorkerError))
