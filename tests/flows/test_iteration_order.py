"""In which order an iteration does its steps."""

from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from flows import iteration
from tasks.order import StepOrder

STEPS = (
    "rollout",
    "reward",
    "advantage",
    "update",
    "sync_weights",
    "evaluate",
    "report_evaluation",
    "checkpoint",
    "report",
    "track",
)


@pytest.fixture
def acts(monkeypatch):
    """What is done, in order; nothing is."""
    done = []

    def step(name):
        async def act(*arguments):
            done.append(name)

        return act

    @asynccontextmanager
    async def opened(*arguments):
        yield SimpleNamespace(run_id="run", order=StepOrder(SimpleNamespace(rollout_lag=0, fills_batches=False)))

    def asked(run, version):
        done.append("is a checkpoint due?")
        return True

    for name in STEPS:
        monkeypatch.setattr(iteration, name, step(name))
    monkeypatch.setattr(iteration, "open_stored", opened)
    monkeypatch.setattr(iteration, "evaluation_due", lambda run, version: True)
    monkeypatch.setattr(iteration, "checkpoint_due", asked)
    return done


async def test_a_version_is_evaluated_before_it_is_asked_whether_to_save_it(acts):
    """Else a version that turns out to be the best would not be saved."""
    await iteration.iteration_flow.fn("run", 0, "root")

    assert acts == [*STEPS[:7], "is a checkpoint due?", *STEPS[7:]]
