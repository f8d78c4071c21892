"""A trained model as a source, with ranks that follow a script."""

from __future__ import annotations

import asyncio
import time

import pytest
from reward_rig import samples

from rlhf_core.config.model import RewardConfig
from rlhf_core.errors import RewardError, WorkerError
from rlhf_core.records import RewardStatus
from rlhf_core.rewards import make_reward_source
from rlhf_core.rewards.model_source import ModelSource
from rlhf_core.rewards.model_text import UnreadableError

OK, ERROR, TIMED_OUT = RewardStatus.OK, RewardStatus.ERROR, RewardStatus.TIMED_OUT


def read(request):
    """One token a character of the answer."""
    if request.answer == "unreadable":
        raise UnreadableError("the sample has 99 tokens, more than reward.model_max_len=9")
    return [ord(character) for character in request.answer]


class Rank:
    """Scores a row by its length; ``first`` are exceptions, answers or seconds of its first calls."""

    def __init__(self, *first):
        self.first = list(first)
        self.calls = []
        self.at_once = 0

    async def __call__(self, rows):
        self.calls.append([len(row) for row in rows])
        self.at_once += 1
        assert self.at_once == 1, "a rank scores one call at a time"
        try:
            said = self.first.pop(0) if self.first else None
            if isinstance(said, Exception):
                raise said
            await asyncio.sleep(said if isinstance(said, float) else 0)
            return said if isinstance(said, list) else [float(len(row)) for row in rows]
        finally:
            self.at_once -= 1


def source_of_ranks(*ranks, timeout=0.2, max_retries=0):
    """Calls of 4 rows."""
    return ModelSource(ranks, read, micro_batch_size=1, timeout=timeout, max_retries=max_retries)


def texts(*lengths):
    return samples(["x" * length for length in lengths])


async def test_scores_come_back_in_the_order_of_the_samples():
    rank = Rank()

    results = await source_of_ranks(rank).score(texts(3, 1, 9, 2, 5))

    assert [result.reward for result in results] == [3.0, 1.0, 9.0, 2.0, 5.0]
    assert rank.calls == [[9, 5, 3, 2], [1]]  # longest first


async def test_ranks_share_the_calls():
    ranks = [Rank(), Rank(0.05, 0.05)]

    results = await source_of_ranks(*ranks).score(texts(*range(1, 41)))

    assert [result.status for result in results] == [OK] * 40
    assert len(ranks[0].calls) + len(ranks[1].calls) == 10
    assert len(ranks[0].calls) > len(ranks[1].calls) > 0  # the slow one takes fewer


async def test_an_unreadable_sample_is_its_own_error():
    rank = Rank()

    results = await source_of_ranks(rank).score(samples(["x", "unreadable", "xx"]))

    assert [(result.status, result.reward) for result in results] == [(OK, 1.0), (ERROR, None), (OK, 2.0)]
    assert "reward.model_max_len=9" in results[1].error


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ([1.0, float("nan")], "gave nan for this sample"),
        ([1.0, float("inf")], "gave inf"),
    ],
)
async def test_a_score_that_is_no_number_is_its_own_error(said, named):
    good, bad = await source_of_ranks(Rank(said)).score(texts(2, 1))

    assert (good.status, good.reward, bad.status, bad.reward) == (OK, 1.0, ERROR, None)
    assert named in bad.error


@pytest.mark.parametrize(
    ("said", "named"),
    [([1.0], "gave 1 scores for 2 rows"), (RuntimeError("out of memory"), "raised RuntimeError: out of memory")],
)
async def test_a_failed_call_is_an_error_of_its_rows(said, named):
    results = await source_of_ranks(Rank(said)).score(texts(2, 1))

    assert [result.status for result in results] == [ERROR, ERROR]
    assert all(named in result.error for result in results)


async def test_a_dead_rank_is_the_clusters_matter():
    with pytest.raises(WorkerError, match="rank 0 died"):
        await source_of_ranks(Rank(WorkerError("rank 0 died")), Rank()).score(texts(2, 1))


async def test_a_rank_that_hangs_costs_its_call_and_the_others_go_on():
    ranks = [Rank(100.0), Rank()]

    results = await source_of_ranks(*ranks).score(texts(*range(1, 41)))

    lost = [result for result in results if result.status is TIMED_OUT]
    assert len(lost) == 4
    assert all("reward.timeout=0.2 s" in result.error and result.reward is None for result in lost)
    assert [result.status for result in results].count(OK) == 36


async def test_a_call_that_timed_out_is_tried_on_another_rank():
    """The other rank has finished its own calls long before."""
    ranks = [Rank(100.0), Rank()]

    results = await source_of_ranks(*ranks, max_retries=1).score(texts(*range(1, 9)))

    assert [result.status for result in results] == [OK] * 8
    assert len(ranks[1].calls) == 2


async def test_when_all_ranks_hang_the_scoring_ends():
    """CASE 40."""
    started = time.monotonic()

    with pytest.raises(RewardError, match=r"no rank of the reward model answered within reward\.timeout=0\.2 s"):
        await source_of_ranks(Rank(100.0), Rank(100.0)).score(texts(*range(1, 100)))

    assert time.monotonic() - started < 3


async def test_a_rank_that_was_late_is_used_again():
    rank = Rank(0.3)
    source = source_of_ranks(rank)

    (late,) = await source.score(texts(2))
    await asyncio.sleep(0.2)
    (result,) = await source.score(texts(2))

    assert (late.status, result.status) == (TIMED_OUT, OK)


async def test_two_scorings_at_once_take_turns():
    source = source_of_ranks(Rank(0.05, 0.05), timeout=5)

    first, second = await asyncio.gather(source.score(texts(1)), source.score(texts(2)))

    assert (first[0].reward, second[0].reward) == (1.0, 2.0)


async def test_a_model_and_a_function_add_up():
    config = {
        "functions": [{"use": "digits"}],
        "model_name_or_path": "some/model",
        "model_weight": 0.1,
        "num_workers": 1,
    }
    total = make_reward_source(RewardConfig.model_validate(config), source_of_ranks(Rank()))

    (result,) = await total.score(samples(["12"]))
    await total.close()

    assert result.reward == pytest.approx(1.0 + 0.1 * 2)
    assert result.metrics == {"reward/digits": 1.0, "reward/model": 2.0}


async def test_no_samples_no_calls():
    rank = Rank()

    assert await source_of_ranks(rank).score([]) == []
    assert rank.calls == []
