"""The sync of a version: of the newest one only."""

import pytest
from task_samples import complete, open_run

from tasks import run as open_runs
from tasks.weights import sync_weights


@pytest.fixture
def synced(tmp_path, monkeypatch):
    """The versions that were sent, of a run that has come to version 2."""
    run, versions = open_run(tmp_path), []
    for iteration in range(2):
        complete(run, iteration)

    async def with_engines(oldest, newest, work):
        versions.append((oldest, newest))
        await work()

    monkeypatch.setattr(run.session, "with_engines", with_engines, raising=False)
    monkeypatch.setitem(open_runs._OPEN, "run", run)
    return versions


async def test_the_newest_version_is_sent(synced):
    await sync_weights.fn("run", 2)

    assert synced == [(2, 2)]


async def test_an_old_iteration_that_is_run_again_does_not_take_the_engines_back(synced):
    assert await sync_weights.fn("run", 1) == {"version": 1, "superseded_by": 2}
    assert synced == []
