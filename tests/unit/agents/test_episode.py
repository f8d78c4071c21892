"""A sample that fails is recorded; its group goes on. An engine that is gone is no fault of a sample."""

import asyncio
import dataclasses
import time

import pytest
from agent_script import AlwaysFails, Environment, Scripted, SlowButFine, answer, episode, groups

from rlhf_core.agents import SingleTurnAgentExecutor, run_episode, run_group
from rlhf_core.errors import DeadlineError, GenerationError, WorkerError
from rlhf_core.records import RewardStatus, StopReason

EXECUTOR = SingleTurnAgentExecutor()


def breaks(*samples, error=None):
    """Answers all but these samples (``group-sample``)."""

    def script(request):
        name = request.request_id.removeprefix("3-0-")
        return error or ValueError(f"tool {name} is broken") if name in samples else answer(request)

    return Scripted(script)


async def test_one_failing_sample_of_32():
    """CASE 21: 8 prompts x 4, one sample raises: 31 usable, the failed one is recorded with its reason."""
    batch = groups(breaks("g3-2"))

    rows = [row for group in batch for row in await run_group(EXECUTOR, group)]

    [failed] = [row for row in rows if row.failed]
    assert len(rows) == 32
    assert failed.key == ("g3", 2, 0)
    assert (failed.stop_reason, failed.error) == (StopReason.ERROR, "ValueError: tool g3-2 is broken")
    assert failed.reward_status is RewardStatus.SKIPPED


async def test_a_failure_before_the_first_action():
    """CASE 27: an environment that fails at once leaves no row to train; its group goes on with n - 1."""

    async def act(played):
        if played.sample_index == 0:
            raise ConnectionError("no environment")
        return await EXECUTOR.execute(played)

    rows = await run_group(Environment(act), groups(Scripted(), prompts=1)[0])

    assert [row.failed for row in rows] == [True, False, False, False]
    assert (rows[0].action_ranges, rows[0].num_actions, rows[0].version_spans) == ((), 0, ())
    assert rows[0].token_ids.tolist() == [11, 12, 13]
    assert rows[0].rollout_logprobs.tolist() == [0, 0, 0]


async def test_a_missing_logprob_fails_the_sample_only():
    """CASE 68"""
    script = Scripted(lambda r: answer(r, logprobs=(-1.2,) if r.request_id.endswith("-1") else (-1.2, -0.1)))

    rows = await run_group(EXECUTOR, groups(script, prompts=1)[0])

    assert [row.failed for row in rows] == [False, True, False, False]
    assert "1 log-probs for 2 tokens" in rows[1].error


@pytest.mark.parametrize("error", [GenerationError("engine said no"), DeadlineError("no answer within 5 s")])
async def test_the_reason_names_the_kind_of_error(error):
    [row] = await run_episode(EXECUTOR, episode(Scripted(lambda r: error)))

    assert row.error == f"{type(error).__name__}: {error}"


async def test_every_sample_may_fail():
    rows = await run_group(EXECUTOR, groups(AlwaysFails(), prompts=1)[0])

    assert [row.error for row in rows] == [f"GenerationError: request 3-0-g0-{i}: refused" for i in range(4)]


async def test_no_trajectory_at_all_is_a_failure():
    async def act(played):
        return []

    [row] = await run_episode(Environment(act), episode(Scripted()))

    assert row.error == "GenerationError: Environment returned no trajectory"


async def test_a_dead_engine_is_no_fault_of_a_sample():
    with pytest.raises(WorkerError, match="engine died"):
        await run_episode(EXECUTOR, episode(Scripted(lambda r: WorkerError("engine died"))))


async def test_a_dead_engine_ends_the_other_samples_of_the_group():
    ended = []

    async def act(played):
        if played.sample_index == 0:
            raise WorkerError("engine died")
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(played.sample_index)

    with pytest.raises(WorkerError):
        await run_group(Environment(act), groups(Scripted(), prompts=1)[0])
    await asyncio.sleep(0)

    assert ended == [1, 2, 3]


async def test_rows_are_in_sample_order_whatever_finishes_first():
    async def act(played):
        await asyncio.sleep(0.01 * (4 - played.sample_index))
        return await EXECUTOR.execute(played)

    rows = await run_group(Environment(act), groups(Scripted(), prompts=1)[0])

    assert [row.sample_index for row in rows] == [0, 1, 2, 3]


async def test_segments_stay_together():
    async def act(played):
        [row] = await EXECUTOR.execute(played)
        return [row, dataclasses.replace(row, segment_index=1)]

    rows = await run_group(Environment(act), groups(Scripted(), prompts=1, samples=2)[0])

    assert [row.key[1:] for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]


async def test_rows_say_when_and_how_long():
    before = time.time()

    [row] = await run_episode(EXECUTOR, episode(SlowButFine(0.05)))

    assert before <= row.started_at <= time.time()
    assert 0.05 <= row.seconds < 5


async def test_samples_do_not_share_sampling_parameters():
    """CASE 92: two samples of one prompt with limits of 5 and 8 tokens."""
    generate = Scripted()
    first, second = groups(generate, prompts=1, samples=2)[0]
    first = dataclasses.replace(first, sampling=dataclasses.replace(first.sampling, max_tokens=5))

    await run_group(EXECUTOR, [first, second])

    assert [request.sampling.max_tokens for request in generate.requests] == [5, 8]


async def test_sampling_parameters_cannot_be_changed():
    """CASE 92"""
    played = episode(Scripted())

    with pytest.raises(dataclasses.FrozenInstanceError):
        played.sampling.max_tokens = 5


async def test_every_sample_has_its_own_request_and_seed():
    generate = Scripted()

    await run_group(EXECUTOR, groups(generate, prompts=1)[0])

    assert len({request.request_id for request in generate.requests}) == 4
    assert [request.sampling.seed for request in generate.requests] == [100, 101, 102, 103]
