"""Who is told of runs that end badly: a webhook, whose URL is a secret.

::

    $RLHF_NOTIFY_URL, else Prefect's Secret block `rlhf-notify-url` ─▶ Webhook block `rlhf-notify` ◀─ automation `rlhf-notify`

The automation (``notifications`` of deployments/automations.yaml) names the block alone. The URL lies in the block, which the
server keeps encrypted and shows masked. Neither variable nor Secret block: both are removed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import yaml
from prefect import get_client
from prefect.blocks.system import Secret
from prefect.blocks.webhook import Webhook
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound
from prefect.types import SecretDict
from pydantic import SecretStr

from rlhf_cli.automations import AUTOMATIONS_FILE, set_up_automations
from rlhf_cli.notify_url import checked_url, notify_url

if TYPE_CHECKING:
    from pathlib import Path
    from uuid import UUID

BLOCK = "rlhf-notify"
SECRET_BLOCK = "rlhf-notify-url"


async def set_up_notifications(file: Path = AUTOMATIONS_FILE) -> None:
    """Make them, bring them up to date, or remove them.

    Raises:
        ConfigError: the URL is none.
    """
    url = notify_url(os.environ) or await _url_of_block()
    if url is None:
        await _remove([each["name"] for each in _defined(file)])
        return
    webhook = Webhook(url=SecretStr(url), headers=SecretDict({"Content-Type": "application/json"}))
    await set_up_automations(read_notifications(await webhook.asave(BLOCK, overwrite=True), file))


def read_notifications(block: UUID, file: Path = AUTOMATIONS_FILE) -> list[AutomationCore]:
    """Those of the file, checked, with the block that they call."""
    found = _defined(file)
    for automation in found:
        for action in automation["actions"]:
            action["block_document_id"] = block
    return [AutomationCore.model_validate(each) for each in found]


async def _url_of_block() -> str | None:
    try:
        loaded: Secret[str] = await Secret.aload(SECRET_BLOCK)
    except ValueError:  # Prefect's, of a name that is not there
        return None
    return checked_url(str(loaded.value.get_secret_value()), f"the Secret block {SECRET_BLOCK}")


def _defined(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(file.read_text())["notifications"]
    return found


async def _remove(names: list[str]) -> None:
    async with get_client() as client:
        for name in names:
            for automation in await client.read_automations_by_name(name):
                await client.delete_automation(automation.id)
        try:
            block = await client.read_block_document_by_name(BLOCK, Webhook.get_block_type_slug())
        except ObjectNotFound:
            return
        await client.delete_block_document(block.id)
