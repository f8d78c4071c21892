"""SIGKILL of every process of a run in every stage of an iteration. After each, the weights are those of a calm run.

``make test-faults``; the table stands at the end of its output. Not part of ``make test``: a sample of it is.
"""

import os
import time

import pytest
from fault_matrix import ITERATIONS, PROMPTS, RANKS, STAGES, VICTIMS, MatrixRun, bring_back, iteration_of, strike
from fault_stack import FaultStack

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    running = FaultStack(tmp_path_factory.mktemp("faults"))
    before = dict(os.environ)
    os.environ.update(running.s3.environment)
    try:
        running.start()
        yield running
    finally:
        running.stop()
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="module")
def calm_run(stack):
    """The run that nobody disturbs, by the number of the policy's ranks."""
    done = {}

    def calm(ranks):
        if ranks not in done:
            done[ranks] = MatrixRun(stack, f"calm-{ranks}", ranks)
            done[ranks].wait_for_end()
        return done[ranks]

    return calm


@pytest.fixture(scope="module")
def selected(request):
    """The cells that are run: the command line may name some."""
    return {(item.callspec.params["victim"], item.callspec.params["stage"]) for item in request.session.items}


@pytest.fixture(scope="module")
def runs():
    """The run of each victim."""
    return {}


@pytest.mark.parametrize("stage", [*STAGES, "end"])
@pytest.mark.parametrize("victim", VICTIMS)
def test_killed_and_nothing_lost(stack, calm_run, selected, runs, matrix_table, victim, stage) -> None:
    ranks = RANKS.get(victim, 1)
    calm = calm_run(ranks)
    if stage == "end":
        ends_like(runs[victim], calm)
        return
    matrix_table.lost[victim, stage] = None
    if victim not in runs:  # the first cell, or the one before failed and left a run that cannot be trusted
        rest = [later for later in STAGES[STAGES.index(stage) :] if (victim, later) in selected]
        runs[victim] = MatrixRun(stack, f"{victim}-{stage}".replace(" ", "-").lower(), ranks, victim, rest)
    try:
        matrix_table.lost[victim, stage] = disturb(runs[victim], calm, stage)
    except BaseException:
        runs.pop(victim).cancel()
        stack.up()
        raise


def disturb(run, calm, stage):
    """One cell. Returns the seconds that it cost."""
    iteration = iteration_of(stage)
    holder = run.reach(stage)
    published = run.published(iteration)

    killed_at = time.time()
    strike(run, stage, holder)
    run.release(stage)
    bring_back(run, iteration)
    run.wait_for(iteration)

    assert run.digest(iteration) == calm.digest(iteration)
    assert published <= run.trained_on(iteration), "published, and not trained on"
    ledger, total = run.ledgers(iteration)
    assert ledger.balanced
    assert total.balanced
    assert ledger.drawn == ledger.trained == PROMPTS
    took = run.went_on(iteration) - killed_at
    return max(0.0, took - (calm.went_on(iteration) - calm.began(stage)))


def ends_like(run, calm) -> None:
    """The same weights after every iteration, and every prompt accounted for once."""
    run.wait_for_end()

    assert [run.digest(k) for k in range(ITERATIONS)] == [calm.digest(k) for k in range(ITERATIONS)]
    assert run.ledgers(ITERATIONS - 1) == calm.ledgers(ITERATIONS - 1)
    assert run.stack.tracked_iterations(run.run_id) == ITERATIONS
