"""Groups that are played from one call to the next: who is waited for, who goes on, and what ends when."""

import asyncio

import pytest
from agent_script import Environment, Scripted, Shelf, episode

from rlhf_core.agents import FailureWatch, GroupPublisher, GroupsInPlay, SingleTurnAgentExecutor
from rlhf_core.errors import RunFailedError, WorkerError
from rlhf_core.records import OpenGroup

EXECUTOR = SingleTurnAgentExecutor()


class Stage:
    """Groups g0, g1, …, of two samples each; each plays until it is let go, and raises what it is told to."""

    def __init__(self, limit=99):
        self.shelf, self.ended = Shelf(), []
        self._gates, self._errors = {}, {}
        self.in_play = GroupsInPlay(Environment(self._act), FailureWatch(limit))

    def begin(self, *names, since=0):
        for name in names:
            self._gates[name] = asyncio.Event()
            self.in_play.begin([episode(Scripted(), name, sample) for sample in range(2)], since)

    def let_go(self, *names, error=None):
        for name in names:
            self._errors[name] = error
            self._gates[name].set()

    async def finish(self, wanted=None, surely=()):
        """The groups that finished."""
        rows = await self.in_play.finish(GroupPublisher(self.shelf.publish, 1), wanted, surely)
        return [row.group_id for row in rows if row.sample_index == 0]

    async def _act(self, played):
        try:
            await self._gates[played.group_id].wait()
        except asyncio.CancelledError:
            self.ended.append((played.group_id, played.sample_index))
            raise
        if error := self._errors[played.group_id]:
            raise error
        return await EXECUTOR.execute(played)


@pytest.fixture
async def stage():
    stage = Stage()
    yield stage
    await stage.in_play.end()


async def ticks():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_it_returns_with_as_many_as_are_wanted_and_the_others_go_on(stage):
    stage.begin("g0", "g1", "g2", since=4)
    stage.let_go("g1", "g2")

    assert await stage.finish(wanted=1) == ["g1", "g2"]
    assert stage.in_play.unfinished == (OpenGroup("g0", 4),)
    assert stage.in_play.running == ["g0"]
    assert stage.ended == []
    assert sorted(stage.shelf.groups) in ([["g1"], ["g2"]], [["g1", "g2"]])


async def test_what_finished_between_two_calls_is_published_by_the_next(stage):
    stage.begin("g0", "g1")
    stage.let_go("g0")
    await stage.finish(wanted=1)
    stage.let_go("g1")
    await ticks()
    before = list(stage.shelf.groups)

    stage.begin("g2")

    assert await stage.finish(wanted=1) == ["g1"]
    assert (before, stage.shelf.groups) == ([["g0"]], [["g0"], ["g1"]])


async def test_nothing_is_waited_for_where_nothing_more_is_wanted(stage):
    stage.begin("g0")

    assert await stage.finish(wanted=0) == []
    assert stage.in_play.running == ["g0"]


async def test_some_are_waited_for_in_any_case(stage):
    stage.begin("g0", "g1", "g2")
    stage.let_go("g0")
    finishing = asyncio.create_task(stage.finish(wanted=1, surely=["g2"]))
    await asyncio.sleep(0.05)
    waited = not finishing.done()
    stage.let_go("g2")

    assert (waited, await finishing) == (True, ["g0", "g2"])
    assert stage.in_play.running == ["g1"]


async def test_an_engine_that_dies_ends_all_of_them(stage):
    stage.begin("g0", "g1", "g2")
    stage.let_go("g0")
    await stage.finish(wanted=1)
    stage.let_go("g1", error=WorkerError("the engine died"))

    with pytest.raises(WorkerError, match="the engine died"):
        await stage.finish()

    assert stage.in_play.begun_in == {}
    assert stage.ended == [("g2", 0), ("g2", 1)]


async def test_a_call_that_is_cancelled_ends_all_of_them_and_publishes_what_had_finished(stage):
    stage.begin("g0", "g1")
    finishing = asyncio.create_task(stage.finish())
    await ticks()
    stage.let_go("g0")
    await ticks()

    finishing.cancel()
    await asyncio.wait([finishing])

    assert finishing.cancelled()
    assert (stage.in_play.begun_in, stage.shelf.groups) == ({}, [["g0"]])
    assert stage.ended == [("g1", 0), ("g1", 1)]


async def test_groups_that_nobody_wants_any_more_end_alone(stage):
    stage.begin("g0", "g1")
    await ticks()

    assert await stage.in_play.end(["g1", "unknown"]) == []

    assert stage.ended == [("g1", 0), ("g1", 1)]
    assert stage.in_play.running == ["g0"]


async def test_groups_whose_engine_died_meanwhile_are_named(stage):
    stage.begin("g0", "g1")
    stage.let_go("g0", error=WorkerError("the engine died"))
    await ticks()

    assert stage.in_play.lost == ["g0"]


async def test_failures_in_a_row_are_counted_over_calls(stage):
    """g1 is drawn between g0 and g2, and finishes last."""
    stage = Stage(limit=6)
    stage.begin("g0", "g1", "g2")
    stage.let_go("g0", "g2", error=ValueError("broken"))
    assert await stage.finish(wanted=2) == ["g0", "g2"]
    stage.let_go("g1", error=ValueError("broken"))

    with pytest.raises(RunFailedError, match="6 samples failed in a row: 6 × ValueError: broken"):
        await stage.finish()


async def test_what_no_row_can_reach_is_forgotten():
    stage = Stage(limit=3)
    stage.begin(*(f"g{number}" for number in range(20)))
    stage.let_go(*(f"g{number}" for number in range(20)))

    await stage.finish()

    assert len(stage.in_play._watch._reasons) <= 3
