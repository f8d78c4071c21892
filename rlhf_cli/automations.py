"""Crashed runs go on by themselves: deployments/automations.yaml, brought to a Prefect server.

``python -m rlhf_cli.automations`` does it for the server of ``PREFECT_API_URL``; ``rlhf up`` for the local stack's.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import yaml
from prefect import get_client
from prefect.events.schemas.automations import AutomationCore

AUTOMATIONS_FILE = Path("deployments/automations.yaml")


def read_automations(file: Path = AUTOMATIONS_FILE) -> list[AutomationCore]:
    """Those of the file, checked."""
    return [AutomationCore.model_validate(each) for each in yaml.safe_load(file.read_text())["automations"]]


async def set_up_automations(wanted: list[AutomationCore]) -> None:
    """Make them, and bring those that exist up to date. One that was switched off stays off.

    One that is as wanted is left alone: an update forgets every heartbeat that it is waiting for.
    """
    async with get_client() as client:
        for automation in wanted:
            found = await client.read_automations_by_name(automation.name)
            if not found:
                await client.create_automation(automation)
            elif _meaning(found[0]) != _meaning(automation):
                automation.enabled = found[0].enabled
                await client.update_automation(found[0].id, automation)


def _meaning(automation: AutomationCore) -> dict[str, Any]:
    """What it does and when."""
    return automation.model_dump(include={"description", "trigger", "actions"}, exclude={"trigger": {"id"}})


if __name__ == "__main__":
    asyncio.run(set_up_automations(read_automations()))
