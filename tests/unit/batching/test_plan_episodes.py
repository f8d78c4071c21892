"""Optimizer steps are made of episodes: all segments of one in the same step, each episode one sample."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.batching import plan_update

pytestmark = pytest.mark.agents


def steps_of(episodes, samples_per_step=2, num_actions=None, **changes):
    count = len(episodes)
    settings = {
        "world_size": 2,
        "samples_per_step": samples_per_step,
        "max_epochs": 1,
        "seed": 7,
        "iteration": 3,
        "micro_batch_size": 2,
        **changes,
    }
    return plan_update([9] * count, num_actions or [3] * count, episodes=episodes, **settings)


def rows_of(step):
    return sorted(row for plan in step.micro_batches for micro in plan if not micro.filler for row in micro.rows)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=24), st.integers(1, 4))
def test_the_segments_of_an_episode_are_in_one_step(episodes, samples_per_step):
    steps = steps_of(episodes, samples_per_step)

    assert sorted(row for step in steps for row in rows_of(step)) == list(range(len(episodes)))
    for step in steps:
        held = {episodes[row] for row in rows_of(step)}
        assert rows_of(step) == [row for row, episode in enumerate(episodes) if episode in held]
        assert step.num_sequences == len(held) <= samples_per_step
        assert step.num_rows == len(rows_of(step))
    assert len(steps) == -(-len(set(episodes)) // samples_per_step)


def test_each_segment_knows_the_tokens_of_its_episode():
    """Rows 0 and 2 are an episode of 3 + 4 tokens; row 3 is a segment that said nothing, and is in no step."""
    (step,) = steps_of(["a", "b", "a", "a"], num_actions=[3, 5, 4, 0])

    assert step.episode_tokens == {0: 7, 2: 7}
    assert (step.num_sequences, step.num_tokens, step.num_rows) == (2, 12, 3)


def test_rows_that_are_episodes_are_planned_as_before():
    assert steps_of(list("abcdefg")) == plan_update(
        [9] * 7, [3] * 7, world_size=2, samples_per_step=2, max_epochs=1, seed=7, iteration=3, micro_batch_size=2
    )
