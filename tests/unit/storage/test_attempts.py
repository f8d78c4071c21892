"""Who worked on a run: numbered, with how it ended; and when versions reached the engines."""

import pytest

from rlhf_core.errors import WorkerError
from rlhf_core.storage import Restart, RunStore, begin_attempt, end_attempt, read_attempts, record_sync
from rlhf_core.storage.attempts import MAX_MESSAGE, sync_path
from rlhf_core.storage.audit.verification import verify


@pytest.fixture
def store(tmp_path):
    run = RunStore("run", str(tmp_path))
    run.write_run({"run_id": "run", "created_at": "2026"})
    return run


def test_an_attempt_that_was_killed_and_one_that_failed(store, monkeypatch):
    monkeypatch.setenv("MY_SECRET_TOKEN", "hunter2-hunter2")
    begin_attempt(store, "a", 1, "flow-1")
    second = begin_attempt(store, "b", 2, None)
    end_attempt(store, second, WorkerError("no hunter2-hunter2 \ud800" + "x" * 9000), [Restart(7.0, "engine-0")])

    killed, failed = read_attempts(store)

    assert (killed.number, killed.host, killed.flow_run_id, killed.ended_at) == (1, "a", "flow-1", None)
    assert (failed.number, failed.pid, failed.error) == (2, 2, "WorkerError")
    assert failed.message.startswith("no *** ?x")
    assert len(failed.message) == MAX_MESSAGE
    assert failed.restarts == (Restart(7.0, "engine-0"),)


def test_the_first_sync_of_a_version_stays(store):
    record_sync(store, 3, {"started_at": 1.0, "seconds": 2.0})
    record_sync(store, 3, {"started_at": 9.0, "seconds": 9.0})

    assert b'"started_at":1.0' in store.objects.read(sync_path(2))


def test_they_are_documents_of_the_run(store):
    end_attempt(store, begin_attempt(store, "a", 1, None), None, [])
    record_sync(store, 1, {"started_at": 1.0, "seconds": 2.0})
    whole = verify(store)
    store.objects.put("attempts/00000001-end.json", b"{")

    assert (whole.ok, whole.documents, whole.unnamed) == (True, 4, 0)
    assert [fault.path for fault in verify(store).faults] == ["attempts/00000001-end.json"]


def test_an_old_log_has_none(store):
    assert read_attempts(store) == []
