"""Weighted sums."""

from __future__ import annotations

import pytest
from reward_rig import samples

from rlhf_core.records import RewardResult, RewardStatus
from rlhf_core.rewards import Part, WeightedSum

OK, ERROR, TIMED_OUT = RewardStatus.OK, RewardStatus.ERROR, RewardStatus.TIMED_OUT


class Scripted:
    """Answers what it was told to."""

    def __init__(self, *results):
        self.results = list(results)
        self.closed = False

    async def score(self, requests):
        return self.results

    async def close(self):
        self.closed = True


def ok(reward, score=None, **metrics):
    return RewardResult(OK, reward, score, metrics, seconds=1.0)


async def total(*parts):
    """The one result of a sum of (weight, result) pairs, named a, b, ..."""
    named = zip("abc", parts, strict=False)
    source = WeightedSum([Part(name, weight, Scripted(result)) for name, (weight, result) in named])
    (result,) = await source.score(samples(["x"]))
    return result


async def test_parts_are_weighted_and_logged_unweighted():
    result = await total((1.0, ok(0.5)), (0.1, ok(2.0)))

    assert result.reward == pytest.approx(0.7)
    assert result.metrics == {"reward/a": 0.5, "reward/b": 2.0}
    assert (result.status, result.seconds) == (OK, 2.0)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [((None, None), 3.0), ((0.25, None), 0.25), ((None, 0.5), 0.5), ((0.25, 0.5), 3.0)],
)
async def test_the_score_is_the_only_one_given_else_the_reward(scores, expected):
    result = await total((1.0, ok(1.0, scores[0])), (1.0, ok(2.0, scores[1])))

    assert result.score == expected


async def test_a_single_part_keeps_its_log_names_and_several_are_prefixed():
    one = await total((1.0, ok(1.0, length=3.0)))
    two = await total((1.0, ok(1.0, length=3.0)), (1.0, ok(1.0, length=4.0)))

    assert one.metrics == {"reward/a": 1.0, "length": 3.0}
    assert two.metrics == {"reward/a": 1.0, "reward/b": 1.0, "a/length": 3.0, "b/length": 4.0}


@pytest.mark.parametrize(
    ("missing", "status"),
    [((ERROR, OK), ERROR), ((ERROR, TIMED_OUT), TIMED_OUT), ((TIMED_OUT, OK), TIMED_OUT)],
)
async def test_a_missing_part_is_named_and_the_others_stay_logged(missing, status):
    """CASE 100: no reward, and the mean of a part is over the samples it scored."""
    results = [ok(1.0) if kind is OK else RewardResult(kind, error="why") for kind in missing]

    result = await total((1.0, results[0]), (1.0, results[1]))

    assert (result.status, result.reward, result.score) == (status, None, None)
    assert "a: why" in result.error
    assert result.metrics == ({"reward/b": 1.0} if missing[1] is OK else {})


async def test_a_sum_beyond_floats_is_an_error():
    result = await total((10.0, ok(1e308)))

    assert (result.status, result.reward) == (ERROR, None)


async def test_close_reaches_every_part():
    parts = [Part("a", 1.0, Scripted()), Part("b", 1.0, Scripted())]

    await WeightedSum(parts).close()

    assert [part.source.closed for part in parts] == [True, True]
