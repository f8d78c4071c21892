"""Automations of crashed runs on a real Prefect server: set up once, kept as people left them."""

import pytest
import yaml
from prefect import get_client

from rlhf_cli.automations import AUTOMATIONS_FILE, read_automations, set_up_automations

pytestmark = pytest.mark.stack


async def on_server():
    async with get_client() as client:
        found = {each.name: each for each in await client.read_automations()}
    return {each.name: found.get(each.name) for each in read_automations()}


@pytest.fixture
async def made(prefect_api):
    await set_up_automations(read_automations())
    yield await on_server()
    async with get_client() as client:
        for automation in (await on_server()).values():
            await client.delete_automation(automation.id)


async def test_set_up_again_touches_nothing(made) -> None:
    """An update would forget the heartbeats that it waits for: a run lost just before would never be found."""
    await set_up_automations(read_automations())

    assert await on_server() == made
    assert all(made.values())


async def test_one_that_changed_is_brought_up_to_date_and_one_switched_off_stays_off(made, tmp_path) -> None:
    async with get_client() as client:
        await client.pause_automation(made["rlhf-lost"].id)
    tree = yaml.safe_load(AUTOMATIONS_FILE.read_text())
    tree["automations"][0]["trigger"]["within"] = 300
    (tmp_path / "changed.yaml").write_text(yaml.safe_dump(tree))

    await set_up_automations(read_automations(tmp_path / "changed.yaml"))

    lost = (await on_server())["rlhf-lost"]
    assert lost.id == made["rlhf-lost"].id
    assert (lost.trigger.within.total_seconds(), lost.enabled) == (300, False)
