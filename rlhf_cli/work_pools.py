"""The work pool in which every deployment runs, and how many runs may be under way in it.

::

    pool `rlhf`, of a type of deployments/prefect.yaml
      queue default    runs of people and schedules    limited: the next one waits until a run is over
            data       what needs no GPU               not limited
            children   iterations, stages of a chain   not limited: their parents execute them
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from prefect import get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.workers.utilities import get_default_base_job_template_for_infrastructure_type

from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.objects import WorkPool

PREFECT_FILE = Path("deployments/prefect.yaml")
POOL = "rlhf"
LIMITED_QUEUE = "default"  # Prefect makes it with the pool

PoolType = Literal["process", "docker", "kubernetes"]


async def set_up_pool(kind: PoolType | None = None, concurrent_runs: int | None = None) -> None:
    """Have the pool, and a limit on the queue in which people start runs.

    Args:
        kind: its type, whose template it gets; None: the pool as it is, or one of type process where there is none.
        concurrent_runs: runs at a time; None: as before, and one where there was no limit.

    Raises:
        ConfigError: the server's pool has another type.
    """
    async with get_client() as client:
        pool = await _existing(client) or await _made(client, kind or "process")
        if kind is not None:
            await _bring_up_to_date(client, pool, kind)
        queue = await client.read_work_queue_by_name(LIMITED_QUEUE, work_pool_name=POOL)
        limit = concurrent_runs or queue.concurrency_limit or 1
        if queue.concurrency_limit != limit:
            await client.update_work_queue(queue.id, concurrency_limit=limit)


async def _existing(client: PrefectClient) -> WorkPool | None:
    try:
        return await client.read_work_pool(POOL)
    except ObjectNotFound:
        return None


async def _made(client: PrefectClient, kind: PoolType) -> WorkPool:
    try:
        return await client.create_work_pool(
            WorkPoolCreate(name=POOL, type=kind, base_job_template=await _template(kind))
        )
    except ObjectAlreadyExists:  # a worker that was started meanwhile made it
        return await client.read_work_pool(POOL)


async def _bring_up_to_date(client: PrefectClient, pool: WorkPool, kind: PoolType) -> None:
    if pool.type != kind:
        raise ConfigError(
            f"--pool {kind}: the work pool {POOL} of this server has the type {pool.type}: leave --pool out to keep it, or "
            f"`prefect work-pool delete {POOL}` first"
        )
    template = await _template(kind)
    if pool.base_job_template != template:  # a worker that came first has made it with Prefect's own
        await client.update_work_pool(POOL, WorkPoolUpdate(base_job_template=template))


async def _template(kind: PoolType) -> dict[str, Any]:
    own = template_of(kind)
    return own if own is not None else await get_default_base_job_template_for_infrastructure_type(kind) or {}


def template_of(kind: PoolType, file: Path = PREFECT_FILE) -> dict[str, Any] | None:
    """The job template that the file names for this type of pool; None: Prefect's own."""
    named = yaml.safe_load(file.read_text())["definitions"]["work_pools"][kind].get("base_job_template")
    if named is None:
        return None
    template: dict[str, Any] = json.loads(Path(named).read_text())
    return template
