"""One local stack for all tests of this folder."""

import pytest
from local_stack import environment_of, processes_of, rlhf


@pytest.fixture(scope="session")
def stack(tmp_path_factory):
    """Environment of a running stack on free ports."""
    environment = environment_of(tmp_path_factory.mktemp("stack-home"))
    started = rlhf(environment, "up")
    assert started.returncode == 0, started.stdout + started.stderr
    yield environment
    stopped = rlhf(environment, "down")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert processes_of(environment) == []
