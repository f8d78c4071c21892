"""A stage whose workers die: they are made again, and it runs again; and the calls that turn a death into an error."""

import pytest
from ray.exceptions import RayActorError

from rlhf_core.cluster import scoring_worker
from rlhf_core.cluster.session import heal
from rlhf_core.errors import LeaseError, TrainingError, WorkerError


class Stage:
    """A stage of which the first attempts fail."""

    def __init__(self, *failures):
        self.failures, self.acts = list(failures), []

    def check(self):
        self.acts.append("check")

    async def ensure(self, version):
        self.acts.append(version)

    async def work(self):
        self.acts.append("work")
        if self.failures:
            raise self.failures.pop(0)
        return "done"

    async def heal(self, max_restarts):
        return await heal(self.check, self.ensure, max_restarts, 3, self.work)


async def test_a_stage_runs_with_every_worker_at_its_version():
    stage = Stage()

    assert await stage.heal(max_restarts=0) == "done"
    assert stage.acts == ["check", 3, "work"]


async def test_a_death_costs_another_attempt():
    stage = Stage(WorkerError("the critic died"), WorkerError("an engine died"))

    assert await stage.heal(max_restarts=2) == "done"
    assert stage.acts == ["check", 3, "work"] * 3


async def test_workers_that_keep_dying_fail_the_run():
    with pytest.raises(WorkerError, match="third"):
        await Stage(*(WorkerError(which) for which in ("first", "second", "third"))).heal(max_restarts=2)


@pytest.mark.parametrize("error", [TrainingError("ranks differ"), LeaseError("lost"), RuntimeError("out of memory")])
async def test_what_another_attempt_would_not_mend_fails_at_once(error):
    stage = Stage(error)

    with pytest.raises(type(error)):
        await stage.heal(max_restarts=2)
    assert stage.acts == ["check", 3, "work"]


async def test_a_rank_that_dies_while_the_rows_are_scored_is_a_dead_worker(monkeypatch):
    """The references are waited for in the scoring worker: there, Ray says that the critic is gone."""

    def get(references):
        raise RayActorError()

    monkeypatch.setattr(scoring_worker.ray, "get", get)

    with pytest.raises(WorkerError, match="a training rank died"):
        await scoring_worker._merged(["reference"])


async def test_the_shares_of_the_ranks_are_one(monkeypatch):
    monkeypatch.setattr(scoring_worker.ray, "get", lambda references: [{"row 0": references[0]}, {"row 1": references[1]}])

    assert await scoring_worker._merged(["a", "b"]) == {"row 0": "a", "row 1": "b"}
