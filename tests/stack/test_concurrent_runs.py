"""Two runs are started at once on a fresh stack: the second waits for the first, and neither for its own child."""

import asyncio
import contextlib
from pathlib import Path

import pytest
from local_stack import ROOT
from prefect import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from rlhf_cli.work_pools import LIMITED_QUEUE, POOL

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

FLOWS = Path(__file__).with_name("queued_flow.py")


@contextlib.asynccontextmanager
async def client_of(stack):
    with temporary_settings({PREFECT_API_URL: stack["PREFECT_API_URL"]}):
        async with get_client() as client:
            yield client


async def limit_of(stack, queue=LIMITED_QUEUE):
    async with client_of(stack) as client:
        return (await client.read_work_queue_by_name(queue, work_pool_name=POOL)).concurrency_limit


async def deploy(client, function, name, queue):
    return await client.create_deployment(
        await client.create_flow_from_name(name.removesuffix("-parent")),
        name.rpartition("-")[2],
        entrypoint=f"{FLOWS}:{function}",
        work_pool_name=POOL,
        work_queue_name=queue,
        pull_steps=[{"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}],
        enforce_parameter_schema=False,
    )


async def until(condition, what, seconds=120):
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.2)


async def test_a_fresh_stack_has_one_run_at_a_time(stack, tmp_path) -> None:
    assert (await limit_of(stack), await limit_of(stack, "data")) == (1, None)
    async with client_of(stack) as client:
        parent = await deploy(client, "parent", "queued-parent", "default")
        await deploy(client, "child", "queued-child", "children")
        runs = [
            await client.create_flow_run_from_deployment(parent, parameters={"folder": str(tmp_path), "name": name})
            for name in ("first", "second")
        ]

        async def states():
            return [(await client.read_flow_run(run.id)).state for run in runs]

        async def one_is_running():
            return len(list(tmp_path.glob("*.running"))) == 1

        await until(one_is_running, "a run, and its child")
        await asyncio.sleep(5)  # the worker asks every second
        waiting = sorted(state.type.value for state in await states())
        assert waiting == ["RUNNING", "SCHEDULED"]
        assert len(list(tmp_path.glob("*.child"))) == 1

        (tmp_path / "go").touch()

        async def both_are_over():
            return all(state.is_final() for state in await states())

        await until(both_are_over, "both runs")
        assert [state.name for state in await states()] == ["Completed", "Completed"]
        assert len(list(tmp_path.glob("*.child"))) == 2
        first, second = sorted([await client.read_flow_run(run.id) for run in runs], key=lambda run: run.start_time)
        assert second.start_time >= first.end_time
    assert await limit_of(stack, "children") is None
