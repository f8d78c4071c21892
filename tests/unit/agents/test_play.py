"""A batch of groups at once: each is published as it finishes, also where another fails."""

import asyncio
import contextlib
import random

import pytest
from agent_script import AlwaysFails, Environment, Scripted, Shelf, answer, episode, groups

from rlhf_core.agents import FailureWatch, GroupPublisher, SingleTurnAgentExecutor, play, run_group
from rlhf_core.agents import rollout as rollout_module
from rlhf_core.errors import GenerationError, RunFailedError, WorkerError

EXECUTOR = SingleTurnAgentExecutor()


async def ticks(count=50):
    """Time enough for every task that need not wait, however busy the machine."""
    for _ in range(count):
        await asyncio.sleep(0)


def slow_if(sample_is_slow, error=None, seconds=60):
    """Plays; where the test says so, first waits, or raises after the others have had their turn."""

    async def act(played):
        if sample_is_slow(played):
            if error is not None:
                await ticks()
                raise error
            await asyncio.sleep(seconds)
        return await EXECUTOR.execute(played)

    return Environment(act)


async def test_rows_come_in_the_order_of_the_groups():
    executor = slow_if(lambda e: e.group_id == "g0", seconds=0.05)

    rows = await play(executor, groups(Scripted(), prompts=3, samples=2), *publishing(Shelf()))

    assert [row.key[:2] for row in rows] == [(f"g{p}", s) for p in range(3) for s in range(2)]


async def test_every_row_is_published_once():
    shelf = Shelf()

    rows = await play(EXECUTOR, groups(Scripted()), *publishing(shelf, per_shard=3))

    assert sorted(row.key for row in shelf.rows) == sorted(row.key for row in rows)
    assert len(shelf.rows) == 32


async def test_a_failed_sample_does_not_stop_the_batch():
    """CASE 21"""
    script = Scripted(lambda r: ValueError("broken") if r.request_id == "3-0-g3-2" else answer(r))
    shelf = Shelf()

    rows = await play(EXECUTOR, groups(script), *publishing(shelf))

    assert sum(not row.failed for row in rows) == 31
    assert [row.error for row in shelf.rows if row.failed] == ["ValueError: broken"]


async def test_finished_groups_are_published_though_an_engine_dies():
    shelf = Shelf()
    executor = slow_if(lambda e: e.group_id == "g2", error=WorkerError("engine died"))

    with pytest.raises(WorkerError, match="engine died"):
        await play(executor, groups(Scripted(), prompts=4, samples=2), *publishing(shelf, per_shard=100))

    assert sorted({row.group_id for row in shelf.rows}) == ["g0", "g1", "g3"]


async def test_a_group_that_finishes_while_another_is_written_is_published_too():
    """g0 fails hard and g1 finishes together; g2 finishes while g1 is being published."""
    shelf, writing = Shelf(), asyncio.Event()

    class SlowShelf(GroupPublisher):
        async def add(self, rows):
            if not writing.is_set():
                writing.set()
                await ticks()
            await super().add(rows)

    async def act(played):
        if played.group_id == "g2":
            await writing.wait()
        if played.group_id == "g0":
            await asyncio.sleep(0)
            raise WorkerError("engine died")
        return await EXECUTOR.execute(played)

    publisher = SlowShelf(shelf.publish, 100)
    with pytest.raises(WorkerError):
        await play(Environment(act), groups(Scripted(), prompts=3, samples=1), publisher, FailureWatch(9))

    assert sorted({row.group_id for row in shelf.rows}) == ["g1", "g2"]


async def test_the_others_are_cancelled_when_an_engine_dies():
    ended = []

    async def act(played):
        if played.group_id == "g0":
            raise WorkerError("engine died")
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(played.group_id)

    with pytest.raises(WorkerError):
        await play(Environment(act), groups(Scripted(), prompts=3, samples=1), *publishing(Shelf()))

    assert sorted(ended) == ["g1", "g2"]


async def test_slow_groups_do_not_hold_up_the_finished_ones(monkeypatch):
    shelf, release = Shelf(), asyncio.Event()
    monkeypatch.setattr(rollout_module, "MAX_WAIT_SECONDS", 0.02)
    monkeypatch.setattr("rlhf_core.agents.publishing.MAX_WAIT_SECONDS", 0.01)

    async def act(played):
        if played.group_id == "g1":
            await release.wait()
        return await EXECUTOR.execute(played)

    batch = groups(Scripted(), prompts=2, samples=1)
    playing = asyncio.create_task(play(Environment(act), batch, *publishing(shelf, per_shard=100)))
    async with asyncio.timeout(5):
        while not shelf.shards:
            await asyncio.sleep(0.01)
    release.set()
    await playing

    assert shelf.groups == [["g0"], ["g1"]]


async def test_failures_in_a_row_stop_the_batch_with_their_reasons():
    shelf = Shelf()

    with pytest.raises(
        RunFailedError, match=r"5 samples failed in a row: .*1 × GenerationError: request 3-0-g0-0: refused"
    ):
        await play(EXECUTOR, groups(AlwaysFails()), *publishing(shelf, limit=5))

    assert shelf.rows  # what failed is recorded too


def publishing(shelf, per_shard=2, limit=9):
    return GroupPublisher(shelf.publish, per_shard), FailureWatch(limit)


# --- FailureWatch


async def rows_of(pattern):
    """One row a letter: ``x`` failed, ``.`` fine."""
    script = Scripted(lambda r: GenerationError("no") if pattern[int(r.request_id[-1])] == "x" else answer(r))
    return await run_group(EXECUTOR, [episode(script, sample=i) for i in range(len(pattern))])


@pytest.mark.parametrize("batches", [["xx.xx"], ["xx", ".", "xx"], [".....", "xx"], [""]])
async def test_a_sample_that_is_fine_starts_the_count_again(batches):
    watch = FailureWatch(max_consecutive=3)

    for pattern in batches:
        watch.saw(await rows_of(pattern))


@pytest.mark.parametrize("batches", [["xxx"], ["xx", "x"], [".xxx."], ["x.x", "xx"]])
async def test_the_limit_over_groups(batches):
    watch = FailureWatch(max_consecutive=3)

    with pytest.raises(RunFailedError, match="^3 samples failed in a row: 3 × GenerationError: no$"):
        for pattern in batches:
            watch.saw(await rows_of(pattern))


@pytest.mark.parametrize(
    ("finished", "stops"),
    [
        ({1: "x", 3: "x", 5: "x", 7: "x", 0: "."}, False),  # every second one crashed at once, the others still play
        ({0: "xx", 2: "xx"}, False),
        ({0: ".x", 2: "x.", 1: "xx"}, True),  # the one in the middle joins them
        ({2: "x", 1: "x", 0: "x"}, True),
        ({0: ".x", 1: "x", 2: "x."}, True),
        ({5: "x", 4: ".", 3: "x", 6: "x"}, False),
    ],
)
@pytest.mark.agents
async def test_in_a_row_are_samples_that_were_drawn_one_after_the_other(finished, stops):
    """Not those that finished so: what fails fails early."""
    watch = FailureWatch(max_consecutive=3)

    with pytest.raises(RunFailedError, match="samples failed in a row") if stops else contextlib.nullcontext():
        for number, pattern in finished.items():
            watch.saw(await rows_of(pattern), number)


@pytest.mark.agents
@pytest.mark.parametrize("samples", [1, 8])
async def test_a_quarter_of_the_environments_crashes_at_once_and_the_batch_completes(samples):
    crashes = random.Random(3)
    broken = {(f"g{number}", i) for number in range(256 // samples) for i in range(samples) if crashes.random() < 0.25}

    async def act(played):
        if (played.group_id, played.sample_index) in broken:
            raise ValueError("crashed")
        await ticks()
        return await EXECUTOR.execute(played)

    drawn = [
        [episode(Scripted(), sample=i, group_id=f"g{number}") for i in range(samples)]
        for number in range(256 // samples)
    ]
    rows = await play(Environment(act), drawn, *publishing(Shelf(), limit=32))

    assert sum(row.failed for row in rows) == len(broken) > 32


async def test_fail_fast_stops_at_the_first():
    watch = FailureWatch(max_consecutive=32, fail_fast=True)

    with pytest.raises(RunFailedError, match="^1 samples failed in a row: 1 × GenerationError: no$"):
        watch.saw(await rows_of("..x."))
