"""A stage whose workers die: they are made again, and it runs again; and the calls that turn a death into an error."""

import pytest
from minimal_config import config
from ray.exceptions import RayActorError

from rlhf_core.cluster import scoring_worker
from rlhf_core.cluster.actor_session import ActorSession
from rlhf_core.errors import LeaseError, TrainingError, WorkerError


class Stage(ActorSession):
    """A session with a stage of which the first attempts fail."""

    def __init__(self, *failures, max_restarts=2):
        super().__init__(groups=None, lease=None, run=config(f"run.max_restarts={max_restarts}").run)
        self.failures, self.acts = list(failures), []

    def check_lease(self):
        self.acts.append("check")

    async def ensure(self, version):
        self.acts.append(version)

    async def tidy(self):
        self.acts.append("tidy")

    async def work(self):
        self.acts.append("work")
        if self.failures:
            raise self.failures.pop(0)
        return "done"

    async def run(self):
        return await self.heal(3, self.work)


async def test_a_stage_runs_with_every_worker_at_its_version():
    stage = Stage(max_restarts=0)

    assert await stage.run() == "done"
    assert stage.acts == ["check", 3, "work"]


async def test_a_death_costs_another_attempt():
    stage = Stage(WorkerError("the critic died"), WorkerError("an engine died"))

    assert await stage.run() == "done"
    assert stage.acts == ["check", 3, "work"] * 3


async def test_workers_that_keep_dying_fail_the_run():
    with pytest.raises(WorkerError, match="third"):
        await Stage(*(WorkerError(which) for which in ("first", "second", "third"))).run()


@pytest.mark.parametrize("error", [TrainingError("ranks differ"), LeaseError("lost"), RuntimeError("out of memory")])
async def test_what_another_attempt_would_not_mend_fails_at_once(error):
    stage = Stage(error)

    with pytest.raises(type(error)):
        await stage.run()
    assert stage.acts == ["check", 3, "work"]


async def test_a_rank_that_dies_while_the_rows_are_scored_is_a_dead_worker(monkeypatch):
    """The references are waited for in the scoring worker: there, Ray says that the critic is gone."""

    def get(references):
        raise RayActorError()

    monkeypatch.setattr(scoring_worker.ray, "get", get)

    with pytest.raises(WorkerError, match="a training rank died"):
        await scoring_worker._merged(["reference"])


async def test_the_shares_of_the_ranks_are_one(monkeypatch):
    monkeypatch.setattr(
        scoring_worker.ray, "get", lambda references: [{"row 0": references[0]}, {"row 1": references[1]}]
    )

    assert await scoring_worker._merged(["a", "b"]) == {"row 0": "a", "row 1": "b"}
