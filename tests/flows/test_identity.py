"""One flow run per iteration for ever, against a real Prefect server.

construction   deployment known?   retried parent skips iterations      flow run of iteration k
plain          no                  gets the right one, not the first    keyed by its own task key
deployed       yes                 gets the right one                   the same run on every attempt
"""

import asyncio

import pytest
from prefect import flow, get_client
from prefect.client.schemas.objects import StateType

from flows.identity import run_child
from flows.overlapping import Overlapping

ran: list[int] = []
fail_at: set[int] = set()
waits_at: set[int] = set()


@flow(name="child-of-a-test", persist_result=False)
async def child(k: int) -> None:
    ran.append(k)
    if k in waits_at:
        await asyncio.sleep(60)
    if k in fail_at:
        while waits_at - set(ran):
            await asyncio.sleep(0.05)
        raise RuntimeError(f"iteration {k} fails on purpose")


@flow(name="parent-of-a-test", persist_result=False)
async def parent(key: str, start: int, stop: int) -> None:
    for k in range(start, stop):
        await run_child(child, "iteration", f"{key}/{k:06d}", f"{key} iteration {k}", {"k": k})


@pytest.fixture
def clean():
    ran.clear()
    fail_at.clear()
    waits_at.clear()


async def runs_of(key: str) -> dict[str, list[tuple[str, int]]]:
    """name -> (state, times run) of every flow run of this key."""
    async with get_client() as client:
        found: dict[str, list[tuple[str, int]]] = {}
        for run in await client.read_flow_runs(limit=200):
            if run.name.startswith(f"{key} "):
                found.setdefault(run.name, []).append((run.state.type.value, run.run_count))
        return found


async def deploy() -> None:
    async with get_client() as client:
        flow_id = await client.create_flow(child)
        await client.create_deployment(flow_id, name="iteration", entrypoint="tests/flows/test_identity.py:child")


@pytest.mark.stack
async def test_plain_children_are_not_mistaken_for_each_other(prefect_api, clean) -> None:
    await parent("plain", 0, 2)

    await parent("plain", 1, 3)  # as a parent does that skips what is finished

    assert ran == [0, 1, 1, 2]


@pytest.mark.stack
async def test_deployed_child_is_one_flow_run_over_all_attempts(prefect_api, clean) -> None:
    await deploy()
    fail_at.add(1)
    with pytest.raises(RuntimeError, match="on purpose"):
        await parent("deployed", 0, 3)
    fail_at.clear()

    await parent("deployed", 1, 3)

    assert ran == [0, 1, 1, 2]
    completed = StateType.COMPLETED.value
    assert await runs_of("deployed") == {
        "deployed iteration 0": [(completed, 1)],
        "deployed iteration 1": [(completed, 2)],
        "deployed iteration 2": [(completed, 1)],
    }


@pytest.mark.stack
async def test_deployed_child_stands_below_its_parent(prefect_api, clean) -> None:
    await deploy()

    await parent("below", 0, 1)

    async with get_client() as client:
        (run,) = [r for r in await client.read_flow_runs(limit=200) if r.name == "below iteration 0"]
        tracking = await client.read_task_run(run.parent_task_run_id)
        above = await client.read_flow_run(tracking.flow_run_id)
        flow_above = await client.read_flow(above.flow_id)
    assert flow_above.name == "parent-of-a-test"
    assert tracking.name == "below iteration 0", "the timeline shows the placeholder under a random name"


@flow(name="parent-of-two-at-once", persist_result=False)
async def two_at_once(key: str) -> None:
    async with Overlapping() as children:
        for k in range(2):
            children.start(run_child(child, "iteration", f"{key}/{k:06d}", f"{key} iteration {k}", {"k": k}))


@pytest.mark.stack
async def test_a_child_that_is_ended_by_the_failure_of_another_is_cancelled_not_crashed(prefect_api, clean) -> None:
    await deploy()
    fail_at.add(1)
    waits_at.add(0)

    with pytest.raises(RuntimeError, match="iteration 1 fails on purpose"):
        await two_at_once("together")

    states = {name: found[0][0] for name, found in (await runs_of("together")).items()}
    assert states == {"together iteration 0": "CANCELLED", "together iteration 1": "FAILED"}
