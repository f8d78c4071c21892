"""The engine worker as the home of sessions: what it says when its engine died, and what it forgets."""

from types import SimpleNamespace

import pytest

from rlhf_core.cluster.engine_worker import EngineWorker
from rlhf_core.errors import WorkerError
from rlhf_core.records import SessionRecord

pytestmark = pytest.mark.agents


class Engine:
    """An engine that may have died inside."""

    dead = False
    dropped = 0

    async def check_health(self):
        if self.dead:
            raise WorkerError("the vLLM engine is not running")

    async def drop_requests(self):
        self.dropped += 1

    async def shutdown(self):
        pass


class Sessions:
    """The server of the engine, and what it was asked."""

    def __init__(self):
        self.asked = []

    async def close_session(self, session_id):
        self.asked.append(session_id)
        return SessionRecord(session_id, ())

    async def close_all(self):
        self.asked.append("all")

    async def stop(self):
        self.asked.append("stop")


@pytest.fixture
def worker():
    worker = EngineWorker(SimpleNamespace(enter=lambda name: None), 0)
    worker._engine, worker._sessions = Engine(), Sessions()
    return worker


async def test_a_session_of_an_engine_that_died_is_no_record(worker):
    """What the agent got to hear may be cut off: the stage asks again, and no sample fails for it."""
    fine = await worker.close_session("a")
    worker._engine.dead = True

    with pytest.raises(WorkerError, match="not running"):
        await worker.close_session("b")

    assert fine == SessionRecord("a", ())


async def test_sessions_of_an_earlier_rollout_are_dropped_with_its_requests(worker):
    await worker.drop_requests()

    assert (worker._sessions.asked, worker._engine.dropped) == (["all"], 1)


async def test_the_server_ends_before_the_engine(worker):
    sessions = worker._sessions

    await worker.shutdown()

    assert (sessions.asked, worker._sessions) == (["stop"], None)
