"""The work pool on a real Prefect server: made once, its limit kept, its type never changed behind one's back."""

import contextlib

import pytest
from prefect import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectNotFound

from rlhf_cli.work_pools import LIMITED_QUEUE, POOL, set_up_pool, template_of
from rlhf_core.errors import ConfigError

pytestmark = pytest.mark.stack


@pytest.fixture
async def client(prefect_api):
    """Of a server without the pool, before and after."""
    async with get_client() as client:
        with contextlib.suppress(ObjectNotFound):
            await client.delete_work_pool(POOL)
        yield client
        await client.delete_work_pool(POOL)


async def limit(client):
    return (await client.read_work_queue_by_name(LIMITED_QUEUE, work_pool_name=POOL)).concurrency_limit


async def test_one_run_at_a_time_until_another_number_is_given_which_stays(client) -> None:
    limits = []
    for asked in (None, 3, None, 1):
        await set_up_pool(concurrent_runs=asked)
        limits.append(await limit(client))

    assert limits == [1, 3, 3, 1]
    assert (await client.read_work_pool(POOL)).type == "process"


@pytest.mark.parametrize("kind", ["docker", "kubernetes"])
async def test_a_pool_that_its_worker_made_first_gets_our_template(client, kind) -> None:
    await client.create_work_pool(WorkPoolCreate(name=POOL, type=kind))

    await set_up_pool(kind)

    assert (await client.read_work_pool(POOL)).base_job_template == template_of(kind)
    assert await limit(client) == 1


async def test_a_pool_of_another_type_is_refused(client) -> None:
    await set_up_pool()

    with pytest.raises(ConfigError, match="--pool docker: the work pool rlhf of this server has the type process"):
        await set_up_pool("docker")

    await set_up_pool()
    assert (await client.read_work_pool(POOL)).type == "process"
