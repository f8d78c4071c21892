"""Finished groups become durable soon."""

from dataclasses import replace

import pytest
from agent_script import Scripted, Shelf, groups

from rlhf_core.agents import GroupPublisher, SingleTurnAgentExecutor, publishing, run_group
from rlhf_core.records import StopReason, VersionSpan


@pytest.fixture
async def finished():
    return [await run_group(SingleTurnAgentExecutor(), group) for group in groups(Scripted(), prompts=5, samples=2)]


@pytest.fixture
def clock(monkeypatch):
    """A monotonic clock that stands still unless it is told otherwise."""

    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(publishing, "time", clock)
    return clock


async def test_so_many_groups_make_a_shard(finished):
    shelf = Shelf()
    publisher = GroupPublisher(shelf.publish, groups_per_shard=2)

    for rows in finished:
        await publisher.add([rows])
    await publisher.flush()

    assert shelf.groups == [["g0", "g1"], ["g2", "g3"], ["g4"]]
    assert [part.rows for part in publisher.parts] == [4, 4, 2]


async def test_a_group_waits_only_so_long_for_company(finished, clock):
    shelf = Shelf()
    publisher = GroupPublisher(shelf.publish, groups_per_shard=100)

    await publisher.add([finished[0]])
    clock.now += publishing.MAX_WAIT_SECONDS + 1
    await publisher.add([finished[1]])

    assert shelf.groups == [["g0", "g1"]]


async def test_overdue_groups_are_published_while_others_are_slow(finished, clock):
    shelf = Shelf()
    publisher = GroupPublisher(shelf.publish, groups_per_shard=100)

    await publisher.add([finished[0]])
    await publisher.flush_overdue()
    before = list(shelf.groups)
    clock.now += publishing.MAX_WAIT_SECONDS + 1
    await publisher.flush_overdue()

    assert (before, shelf.groups) == ([], [["g0"]])


async def test_age_counts_from_the_oldest_group_of_the_shard(finished, clock):
    shelf = Shelf()
    publisher = GroupPublisher(shelf.publish, groups_per_shard=1)

    await publisher.add([finished[0]])
    publisher._groups_per_shard = 100
    clock.now += publishing.MAX_WAIT_SECONDS + 1
    await publisher.add([finished[1]])

    assert shelf.groups == [["g0"]]


async def test_nothing_waiting_makes_no_shard(clock):
    shelf = Shelf()
    publisher = GroupPublisher(shelf.publish, groups_per_shard=1)

    await publisher.flush()
    clock.now += 100
    await publisher.flush_overdue()

    assert (shelf.shards, publisher.parts) == ([], [])


async def test_a_store_that_fails_is_an_error(finished):
    publisher = GroupPublisher(Shelf(broken=True).publish, groups_per_shard=1)

    with pytest.raises(OSError, match="disk full"):
        await publisher.add([finished[0]])


async def test_a_group_with_a_failed_sample_gets_a_shard_of_its_own(finished):
    """So that a later attempt can sample it again without the others."""
    shelf = Shelf()
    publisher = GroupPublisher(shelf.publish, groups_per_shard=10)
    broken = [replace(finished[1][0], stop_reason=StopReason.ERROR, error="env died"), *finished[1][1:]]

    for rows in (finished[0], broken, finished[2]):
        await publisher.add([rows])
    await publisher.flush()

    assert sorted(shelf.groups) == [["g0", "g2"], ["g1"]]


async def test_a_shard_holds_groups_of_one_age(finished):
    """So that what is too old to be trained never lies in a shard with what is."""
    shelf = Shelf()
    publisher = GroupPublisher(shelf.publish, groups_per_shard=3)
    older = [replace(row, version_spans=(VersionSpan(3, 4, 5), VersionSpan(4, 5, 7))) for row in finished[1]]

    await publisher.add([finished[0], older, finished[2]])

    assert sorted(shelf.groups) == [["g0", "g2"], ["g1"]]
    assert len(publisher.parts) == 2
