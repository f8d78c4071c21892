"""Schedules of deployments: turned on and off, and kept as they are when the deployments are made again.

Prefect sets a schedule back to what the file says (``active: false``) whenever it is deployed, so `rlhf up` would silently stop
what a user had turned on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect import get_client
from prefect.exceptions import ObjectNotFound

from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from prefect.client.schemas.objects import DeploymentSchedule
    from prefect.client.schemas.responses import DeploymentResponse


async def switch(deployment: str, active: bool) -> list[str]:
    """Turn every schedule of a deployment on or off. Returns them, as text.

    Args:
        deployment: such as ``rlhf/retrain``.
        active: whether it fires from now on.

    Raises:
        ConfigError: there is no such deployment, or it has no schedule.
    """
    async with get_client() as client:
        try:
            found = await client.read_deployment_by_name(deployment)
        except ObjectNotFound:
            raise ConfigError(f"the Prefect server has no deployment {deployment}: deploy it with `rlhf up`") from None
        if not found.schedules:
            raise ConfigError(
                f"deployment {deployment} has no schedule: add one in deployments/prefect.yaml, and `rlhf up`"
            )
        for schedule in found.schedules:
            await client.update_deployment_schedule(found.id, schedule.id, active=active)
        return [_text(schedule.schedule) for schedule in found.schedules]


async def turned_on() -> list[str]:
    """The deployments with an active schedule, as ``{id}/{slug}``."""
    async with get_client() as client:
        return [
            _key(found, schedule)
            for found in await client.read_deployments()
            for schedule in found.schedules
            if schedule.active and schedule.slug
        ]


async def turn_on_again(keys: list[str]) -> None:
    """Those that are deployed anew and were on before are on again."""
    async with get_client() as client:
        for found in await client.read_deployments():
            for schedule in found.schedules:
                if _key(found, schedule) in keys and not schedule.active:
                    await client.update_deployment_schedule(found.id, schedule.id, active=True)


def _key(found: DeploymentResponse, schedule: DeploymentSchedule) -> str:
    return f"{found.id}/{schedule.slug}"


def _text(schedule: object) -> str:
    return f"cron {cron}" if (cron := getattr(schedule, "cron", None)) else str(schedule)
