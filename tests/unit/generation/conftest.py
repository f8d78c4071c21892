"""One scripted engine for all modules that test the OpenAI-compatible server."""

import pytest


@pytest.fixture(scope="package")
async def rig(tmp_path_factory):
    from serving_rig import start_rig  # imports vLLM's serving classes: seconds, for those who need them

    with pytest.MonkeyPatch.context() as patch:
        rig = await start_rig(tmp_path_factory.mktemp("models"), patch)
        yield rig
        await rig.engine.shutdown()


@pytest.fixture
async def server(rig):
    """A server of its own, with the options of a run that says nothing."""
    async with rig.server() as server:
        yield server
    rig.core.reset()


@pytest.fixture
def playing():
    """``async with playing(server, **limits) as play``: one session with an OpenAI client, closed at the end."""
    from serving_rig import playing

    return playing
