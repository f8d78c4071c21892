"""What a step of an iteration waits for of other iterations.

Q    rollout 2 may begin after
0    rollout 1, version 2 on the engines
1    rollout 1, version 1
2    rollout 1
"""

import asyncio
from types import SimpleNamespace

import pytest

from rlhf_core.errors import RunStoppedError
from tasks.order import Step, StepOrder


def order(lag=1, rounds=False, first=0):
    made = StepOrder(SimpleNamespace(rollout_lag=lag, fills_batches=rounds))
    made.begin(first)
    return made


async def ended(made, *steps):
    for step, iteration in steps:
        made._event(step, iteration).set()


async def is_waiting(awaitable):
    """True if it does not return by itself; it is given up."""
    task = asyncio.ensure_future(awaitable)
    for _ in range(5):
        await asyncio.sleep(0)
    waits = not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return waits


async def enter(made, step, iteration):
    async with made.step(step, iteration):
        pass


@pytest.mark.parametrize(("lag", "published"), [(0, 1), (1, 0)])
async def test_a_rollout_waits_for_the_version_that_is_at_most_so_old(lag, published):
    """Iteration k publishes version k + 1."""
    made = order(lag)
    await ended(made, (Step.ROLLOUT, 0), (Step.ROLLOUT, 1))
    assert await is_waiting(enter(made, Step.ROLLOUT, 2))

    await ended(made, (Step.PUBLISH, published))

    assert not await is_waiting(enter(made, Step.ROLLOUT, 2))


async def test_a_rollout_waits_for_the_one_before():
    made = order(lag=5)
    assert await is_waiting(enter(made, Step.ROLLOUT, 1))

    await enter(made, Step.ROLLOUT, 0)

    assert not await is_waiting(enter(made, Step.ROLLOUT, 1))


async def test_a_rollout_that_scores_waits_for_the_rewards_before_it():
    made = order(lag=5, rounds=True)
    await ended(made, (Step.ROLLOUT, 0))
    assert await is_waiting(enter(made, Step.ROLLOUT, 1))

    await ended(made, (Step.REWARD, 0))

    assert not await is_waiting(enter(made, Step.ROLLOUT, 1))


async def test_a_flow_run_begins_one_rollout_ahead_of_its_turn():
    """Else the engines idle while Prefect makes it."""
    made = order(lag=1)
    assert not await is_waiting(made.may_begin(1))
    assert await is_waiting(made.may_begin(2))

    await ended(made, (Step.ROLLOUT, 0))

    assert not await is_waiting(made.may_begin(2))
    assert await is_waiting(made.may_begin(3))


async def test_back_pressure_holds_up_flow_runs_too():
    made = order(lag=1)
    await ended(made, *((Step.ROLLOUT, k) for k in range(9)))

    assert not await is_waiting(made.may_begin(2))
    assert await is_waiting(made.may_begin(3))


async def test_the_flow_run_of_a_batch_in_rounds_waits_for_its_turn():
    """The data may end before it."""
    made = order(lag=1, rounds=True)
    assert await is_waiting(made.may_begin(1))

    await ended(made, (Step.ROLLOUT, 0), (Step.REWARD, 0))

    assert not await is_waiting(made.may_begin(1))


@pytest.mark.parametrize(
    ("step", "before"),
    [(Step.REWARD, Step.REWARD), (Step.ADVANTAGE, Step.UPDATE), (Step.UPDATE, Step.SAVE)],
)
async def test_who_uses_the_policy_waits_for_who_used_it_before(step, before):
    made = order()
    assert await is_waiting(enter(made, step, 1))

    await ended(made, (before, 0))

    assert not await is_waiting(enter(made, step, 1))


async def test_an_update_waits_until_the_version_before_is_evaluated_and_saved():
    """Case 4: else the best checkpoint would hold later weights than those that were evaluated."""
    made = order()
    await ended(made, (Step.UPDATE, 0), (Step.PUBLISH, 0))

    assert await is_waiting(enter(made, Step.UPDATE, 1))


async def test_a_step_that_fails_has_not_ended():
    made = order()

    with pytest.raises(ValueError, match="on purpose"):
        async with made.step(Step.ROLLOUT, 0):
            raise ValueError("on purpose")

    assert await is_waiting(enter(made, Step.ROLLOUT, 1))


async def test_what_the_log_has_is_not_waited_for():
    made = order(first=7)
    made.begin(3)  # an iteration of the same process: the run has said where it begins

    assert await is_waiting(enter(made, Step.ROLLOUT, 8))
    assert not await is_waiting(enter(made, Step.ROLLOUT, 7))
    assert not await is_waiting(enter(made, Step.UPDATE, 7))


async def test_iterations_that_are_over_take_no_memory_and_are_not_waited_for():
    made = order(lag=1)
    for iteration in range(3):
        for step in Step:
            await enter(made, step, iteration)

    assert not made._done
    assert await is_waiting(enter(made, Step.ROLLOUT, 4))
    assert not await is_waiting(enter(made, Step.ROLLOUT, 3))
    assert not await is_waiting(enter(made, Step.UPDATE, 3))


async def test_once_the_run_is_asked_to_end_no_step_begins():
    """Whoever waits for a step that will never end is told too."""
    made = order()
    waiting = asyncio.ensure_future(enter(made, Step.ADVANTAGE, 1))
    await asyncio.sleep(0)

    async with made.step(Step.ROLLOUT, 0):
        made.stop()

    with pytest.raises(RunStoppedError, match="before advantage 1"):
        await waiting
    with pytest.raises(RunStoppedError, match="before reward 0"):
        await enter(made, Step.REWARD, 0)
    assert not await is_waiting(made.may_begin(7))
