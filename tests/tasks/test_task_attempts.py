"""Two processes that are attempts of one flow run: the later one waits for its turn."""

import asyncio
import dataclasses
import time

import pytest

from rlhf_core.storage import LeaseOwner, RunStore, acquire
from tasks import attempts
from tasks.attempts import earlier_attempt_over


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(attempts, "LOOK_SECONDS", 0.02)
    return RunStore("run", str(tmp_path))


def held_elsewhere(store, job, seconds):
    """By a process of another machine: whether it lives cannot be told from here."""
    return acquire(store, dataclasses.replace(LeaseOwner.of_this_process(job), host="elsewhere"), seconds)


async def test_a_lost_attempt_of_the_same_flow_run_is_waited_for_until_its_lease_expires(store) -> None:
    held_elsewhere(store, "flow-run", 0.5)
    began = time.monotonic()

    await earlier_attempt_over(store, "flow-run")

    assert time.monotonic() - began > 0.3
    acquire(store, LeaseOwner.of_this_process("flow-run"), 60)


async def test_one_that_lives_is_waited_for_until_it_ends(store) -> None:
    lease = held_elsewhere(store, "flow-run", 60)
    waiting = asyncio.create_task(earlier_attempt_over(store, "flow-run"))

    await asyncio.sleep(0.2)
    assert not waiting.done()
    lease.release()

    await asyncio.wait_for(waiting, 5)


@pytest.mark.parametrize("mine", [None, "another flow run", ""])
async def test_nobody_else_waits(store, mine) -> None:
    held_elsewhere(store, "flow-run", 60)

    await asyncio.wait_for(earlier_attempt_over(store, mine), 5)


async def test_a_free_run_is_not_waited_for(store) -> None:
    await asyncio.wait_for(earlier_attempt_over(store, "flow-run"), 5)
