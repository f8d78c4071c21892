"""Weighted sums."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reward_rig import samples

from rlhf_core.errors import RewardError
from rlhf_core.records import RewardResult, RewardStatus
from rlhf_core.rewards import Part, WeightedSum
from rlhf_core.rewards.normalise import moments, normalisation_metrics, updated

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


class Lost(Scripted):
    """Cannot be used at all."""

    async def score(self, requests):
        raise RewardError("no reward server answers")


class Endless(Scripted):
    """Never comes back by itself."""

    ended = False

    async def score(self, requests):
        try:
            await asyncio.Event().wait()
        finally:
            self.ended = True


async def test_a_lost_part_ends_the_others():
    endless = Endless()

    with pytest.raises(RewardError, match="no reward server answers"):
        await WeightedSum([Part("a", 1.0, endless), Part("b", 1.0, Lost())]).score(samples(["x"]))

    assert endless.ended


# --- running normalisation -------------------------------------------------------------------------------------------


def batches(*values):
    """A sum of one part "a" of weight 2, that gives these batches of rewards in turn; None is a failed sample."""
    source = Scripted()
    total = WeightedSum([Part("a", 2.0, source)])

    async def score(index, state):
        source.results = [RewardResult(ERROR, error="why") if value is None else ok(value) for value in values[index]]
        return await total.score_normalised(samples(["x"] * len(values[index])), state)

    return score


async def test_the_first_batch_is_normalised_by_itself():
    """[1, 3]: mean 2, std 1."""
    results, state = await batches([1.0, 3.0])(0, {})

    assert [result.reward for result in results] == [-2.0, 2.0]
    assert state == {"a": {"count": 2.0, "mean": 2.0, "m2": 2.0}}


async def test_a_later_batch_is_normalised_by_all_so_far():
    """[1, 3], then [5, 7]: mean 4, variance 5 of all four."""
    score = batches([1.0, 3.0], [5.0, 7.0])

    _, state = await score(0, {})
    results, state = await score(1, state)

    assert [result.reward for result in results] == pytest.approx([2 * 1 / 5**0.5, 2 * 3 / 5**0.5])
    assert state["a"]["count"] == 4


async def test_the_state_goes_through_json_and_a_repeated_stage_gives_the_same():
    score = batches([1.0, 3.0], [0.1, 0.7])
    _, state = await score(0, {})

    first = await score(1, json.loads(json.dumps(state)))
    again = await score(1, state)

    assert first == again


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3, 123456789.123, 1e-12])
async def test_a_constant_reward_is_exactly_zero(value):
    score = batches([value] * 7, [value] * 3)

    _, state = await score(0, {})
    results, state = await score(1, state)

    assert [result.reward for result in results] == [0.0] * 3
    assert state["a"]["m2"] == 0.0


async def test_failed_samples_count_for_nothing():
    """CASE 100: the mean is over those that were scored."""
    results, state = await batches([1.0, None, 3.0])(0, {})

    assert [(result.status, result.reward) for result in results] == [(OK, -2.0), (ERROR, None), (OK, 2.0)]
    assert state["a"]["count"] == 2


async def test_a_batch_without_any_reward_leaves_the_state():
    score = batches([1.0, 3.0], [None, None])
    _, before = await score(0, {})

    _, after = await score(1, before)
    _, nothing = await score(1, {})

    assert (after, nothing) == (before, {})


async def test_parts_have_their_own_scale_and_are_logged_raw():
    """a: [0, 2] weight 1, b: [100, 300] weight 0.5: both become [-1, 1]."""
    parts = [
        Part("a", 1.0, Scripted(ok(0.0), ok(2.0))),
        Part("b", 0.5, Scripted(ok(100.0, score=0.0), ok(300.0, score=1.0))),
    ]

    results, state = await WeightedSum(parts).score_normalised(samples(["x", "y"]), {})

    assert [result.reward for result in results] == [-1.5, 1.5]
    assert [result.score for result in results] == [0.0, 1.0]
    assert results[1].metrics == {"reward/a": 2.0, "reward/b": 300.0}
    assert normalisation_metrics(state) == {
        "reward_norm/a_mean": 1.0,
        "reward_norm/a_std": 1.0,
        "reward_norm/b_mean": 200.0,
        "reward_norm/b_std": 100.0,
    }


async def test_the_score_stays_raw_where_no_part_gives_one():
    results, _ = await batches([1.0, 3.0])(0, {})

    assert [result.score for result in results] == [2.0, 6.0]


@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=8), max_size=6))
def test_running_moments_are_those_of_all_values(chunks):
    state = {}
    for chunk in chunks:
        state = updated(state, {"a": chunk})

    values = [value for chunk in chunks for value in chunk]
    if not values:
        assert state == {}
        return
    assert state["a"]["mean"] == pytest.approx(np.mean(values), rel=1e-9, abs=1e-9)
    assert moments(state)["a"].std == pytest.approx(np.std(values), rel=1e-6, abs=1e-6)
