"""Agents on the network: the run and they must reach each other."""

import pytest
from config_samples import MINIMAL

from rlhf_core.config import parse_config
from rlhf_core.errors import ConfigError

pytestmark = pytest.mark.agents


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["agent.url=[agents:9000]"], "agent.url=agents:9000: use http://host:port/path"),
        (["agent.url=[ftp://agents/run]"], "use http://host:port/path"),
        (["agent.url=[http://me:secret@localhost/run]"], "a URL with a user or password in it"),
        (
            ["agent.url=[http://agents:9000/run]"],
            r"cannot reach agent.server.host=127.0.0.1: set agent.server.host=0.0.0.0",
        ),
    ],
)
def test_agents_that_cannot_be_reached_are_refused(settings, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        parse_config(MINIMAL, settings)

    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        ["agent.url=[http://localhost:9000/run]"],
        ["agent.url=[http://127.0.0.1:9000/run,https://agents/run]", "agent.server.host=0.0.0.0"],
    ],
)
def test_agents_that_can_be_reached(settings):
    assert parse_config(MINIMAL, settings).execution_mode == "url"
