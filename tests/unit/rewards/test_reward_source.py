"""Whole sources, from the configuration to the typed result."""

from __future__ import annotations

from pathlib import Path

import pytest
from reward_rig import samples, source_of

from rlhf_core.records import RewardStatus

ROOT = Path(__file__).parents[3]


async def test_an_openrlhf_file_runs_as_it_is():
    file = ROOT / "tests" / "data" / "openrlhf_reward.py"

    async with source_of(remote_url=str(file)) as source:
        right, wrong = await source.score(samples(["12", "abc"], ["12", "12"]))

    assert (right.status, right.reward, right.score) == (RewardStatus.OK, pytest.approx(0.98), 1.0)
    assert (wrong.reward, wrong.score) == (pytest.approx(-0.03), 0.0)
    assert right.metrics == {
        "reward/openrlhf_reward": right.reward,
        "length": 2.0,
        "accuracy": 0.5,
        "dropped_logs": 1.0,
    }


async def test_the_example_file_beside_built_ins():
    """A group of two: '12' is right and shortest, 'it is 13' neither."""
    example = ROOT / "configs" / "rewards" / "example.py"
    parts = [
        {"use": f"{example}:ends_with_number"},
        {"use": f"{example}:shortest_wins", "weight": 0.5},
        {"use": "digits", "weight": 2, "name": "share"},
        {"use": "regex", "args": {"pattern": "it is .*"}},
    ]

    async with source_of(functions=parts, num_workers=2) as source:
        right, wrong = await source.score(samples(["12", "it is 13"], [12, 12], group_size=2))

    assert right.reward == pytest.approx(1.0 + 0.5 * 1 + 2 * 1.0 + 0)
    assert wrong.reward == pytest.approx(0.1 + 0.5 * 0 + 2 * 0.25 + 1)
    assert (right.score, wrong.score) == (1.0, 0.0)
    assert wrong.metrics == {
        "reward/ends_with_number": 0.1,
        "ends_with_number/num_numbers": 1.0,
        "reward/shortest_wins": 0.0,
        "reward/share": 0.25,
        "reward/regex": 1.0,
    }


async def test_a_failing_part_leaves_the_sample_without_a_reward():
    """CASE 100 through two real functions: the label of one sample holds no number."""
    async with source_of(functions=[{"use": "last_number"}, {"use": "digits"}]) as source:
        bad, good = await source.score(samples(["12", "12"], ["none", 12]))

    assert (bad.status, bad.reward, bad.metrics) == (RewardStatus.ERROR, None, {"reward/digits": 1.0})
    assert "last_number: the reward function raised ValueError" in bad.error
    assert (good.status, good.reward, good.score) == (RewardStatus.OK, 2.0, 2.0)


async def test_math_verify_runs_in_the_pool():
    async with source_of(functions=[{"use": "math"}]) as source:
        results = await source.score(samples(["\\boxed{0.5}", "\\boxed{3}"], ["1/2", "1/2"]))

    assert [result.reward for result in results] == [1.0, 0.0]
