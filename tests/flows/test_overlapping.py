"""Children that overlap: they end together, and what ended them is raised as it is."""

import asyncio

import pytest
from prefect.exceptions import TerminationSignal

from flows.overlapping import Overlapping


async def fails(error, after=0):
    for _ in range(after):
        await asyncio.sleep(0)
    raise error


async def test_all_are_waited_for():
    done = []

    async def child(name, turns):
        for _ in range(turns):
            await asyncio.sleep(0)
        done.append(name)

    async with Overlapping() as children:
        children.start(child("slow", 5))
        children.start(child("fast", 1))

    assert done == ["fast", "slow"]


async def test_the_first_failure_is_raised_with_its_own_cause_and_ends_the_others():
    ended = []

    async def endless():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("endless")
            raise

    error = ValueError("an engine died")
    error.__cause__ = OSError("by signal 9")

    with pytest.raises(ValueError, match="an engine died") as caught:
        async with Overlapping() as children:
            children.start(endless())
            children.start(fails(error))
            await asyncio.Event().wait()  # the body waits for its turn: it ends too

    assert ended == ["endless"]
    assert isinstance(caught.value.__cause__, OSError)


async def test_a_signal_to_end_counts_more_than_what_fails_because_of_it():
    """Prefect calls a run cancelled if it sees the signal, and crashed if it does not."""

    async def disturbed():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("while it was ending") from None

    with pytest.raises(TerminationSignal):
        async with Overlapping() as children:
            children.start(disturbed())
            await asyncio.sleep(0)
            raise TerminationSignal(signal=15)


async def test_a_failure_of_the_body_is_raised_as_it_is():
    with pytest.raises(ValueError, match="the body"):
        async with Overlapping() as children:
            children.start(asyncio.sleep(3600))
            raise ValueError("the body")
