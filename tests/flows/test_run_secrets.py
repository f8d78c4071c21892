"""``run.secrets``: from a block of a real Prefect server into the environment."""

from __future__ import annotations

import os

import pytest
from prefect.blocks.system import Secret
from prefect.events.worker import EventsWorker

from rlhf_core import redaction
from rlhf_core.errors import ConfigError
from tasks.secrets import load_secrets, loaded_secrets


@pytest.fixture(scope="module", autouse=True)
async def events_are_sent(prefect_api):
    """While there is a server: at the end of the tests Prefect would wait for one for minutes."""
    yield
    await EventsWorker.drain_all(timeout=20)


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch):
    monkeypatch.setattr(redaction, "_remembered", set())
    monkeypatch.setenv("JUDGE", "before")


async def test_a_block_becomes_a_variable_and_is_masked():
    await Secret(value="0123456789").save("judge", overwrite=True)  # not the number it looks like

    await load_secrets({"JUDGE": "judge"})

    assert os.environ["JUDGE"] == loaded_secrets({"JUDGE": "judge"})["JUDGE"] == "0123456789"
    assert redaction.redact("no 0123456789 here") == "no *** here"


async def test_a_block_that_is_not_there_is_named_with_the_remedy():
    with pytest.raises(ConfigError, match=r"run\.secrets\.JUDGE='absent': .* no Secret block of this name: make it"):
        await load_secrets({"JUDGE": "absent"})


async def test_a_block_that_holds_no_text_is_refused():
    await Secret(value={"a": "b"}).save("mapping", overwrite=True)

    with pytest.raises(ConfigError, match=r"run\.secrets\.JUDGE='mapping': the block holds no text"):
        await load_secrets({"JUDGE": "mapping"})
