"""Several trackers, each told for itself."""

import asyncio
import threading
import time

import pytest
from task_samples import Away, Notebook, complete, open_run

from rlhf_core.errors import RlhfError
from tasks import run as run_module
from tasks.lineage import tell_failure, track


class Hanging(Notebook):
    """A tracker that says nothing until it is closed."""

    def __init__(self):
        super().__init__()
        self.closed = threading.Event()

    def start(self, run_id, config, tags):
        assert self.closed.wait(20)
        raise RlhfError("it was closed meanwhile")

    def close(self):
        self.closed.set()


@pytest.fixture
def opened(tmp_path, monkeypatch):
    def make(*metric_trackers, tracker=None):
        run = open_run(tmp_path, tracker=tracker, metric_trackers=metric_trackers)
        complete(run, 0, evaluation=0.5)
        monkeypatch.setitem(run_module._OPEN, "run", run)
        return run

    return make


async def test_all_are_told_the_same(opened):
    beside = Notebook()
    run = opened(beside)

    await track.fn("run", insist=True)

    assert (beside.iterations, beside.evaluations) == (run.tracker.iterations, run.tracker.evaluations)
    assert beside.ends == [True]


async def test_the_failure_of_one_is_a_warning_and_the_others_are_told(opened, caplog):
    other = Notebook()
    opened(Away(), other)

    await track.fn("run", insist=True)

    assert len(other.iterations) == 1
    assert "notebook is not told any more: the tracker is away" in caplog.text


async def test_one_that_hangs_holds_nothing_up_and_ends_with_the_run(opened):
    run = opened(Hanging())

    await asyncio.wait_for(track.fn("run"), 5)
    for telling in run.tellings:
        await telling.close()

    assert len(run.tracker.iterations) == 1


class Slow(Notebook):
    """A tracker that is told what is new while the run is asked to end."""

    def log_iteration(self, iteration, metrics, inputs, ended_at):
        time.sleep(0.2)
        assert "closed" not in self.ends
        super().log_iteration(iteration, metrics, inputs, ended_at)


async def test_a_run_that_is_left_waits_for_what_those_beside_it_are_told(opened):
    beside = Slow()
    run = opened(beside)
    await track.fn("run")  # under way, and without the iteration that is over when the run stops
    complete(run, 1)

    await track.fn("run", leaving=True)
    for telling in run.tellings:
        await telling.close()

    assert [iteration for iteration, *_ in beside.iterations] == [0, 1]
    assert beside.ends == [False, "closed"]
    assert run.tracker.ends == ["closed"], "MLflow's run goes on with the next attempt"


async def test_one_that_does_not_take_it_does_not_keep_a_run_from_stopping(opened, caplog):
    opened(Away())

    await track.fn("run", leaving=True)

    assert "notebook is not told any more: the tracker is away" in caplog.text


async def test_one_that_failed_is_left_alone_for_a_while_and_then_begun_anew(opened):
    beside = Away()
    run = opened(beside)
    telling = run.tellings[1]
    await track.fn("run")
    await telling._task

    telling.tracker = back = Notebook()
    await track.fn("run")
    early = list(back.starts)
    telling._rests_until = 0.0
    await track.fn("run")
    await telling._task

    assert (early, len(back.iterations)) == ([], 1)


async def test_all_hear_of_a_failure(opened):
    beside = Notebook()
    run = opened(beside)

    await tell_failure("run")

    assert run.tracker.ends == beside.ends == [False]
