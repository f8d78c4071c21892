"""Whatever counts samples counts episodes: rows of the same sample, an episode of one row, and one that failed.

::

    group  sample  segment   tokens   stop     reward
    g0     0       0         2        done     1        ┐ one episode
    g0     0       1         4        done     1        ┘
    g0     1       0         3        eos      0
"""

import json
from dataclasses import asdict, replace

import pytest
from cluster_samples import failed, row, scored
from minimal_config import config
from test_experience import made

from rlhf_core.agents import FailureWatch
from rlhf_core.cluster.measures import (
    RolloutTally,
    datasource_metrics,
    evaluation_metrics,
    outcomes,
    readable,
    tally_rollout,
)
from rlhf_core.cluster.selection import trainable, usable_scores, with_rewards
from rlhf_core.errors import RunFailedError
from rlhf_core.records import EpisodeRows, RewardStatus, StopReason, episodes_of

pytestmark = pytest.mark.agents


def broken(reward=1.0, sample=0, group="g0", **changes):
    """An episode of two segments."""
    common = {"reward": reward, "stop": StopReason.DONE} | changes
    return [
        row(group, sample, answer=2, **common),
        replace(row(group, sample, answer=4, **common), segment_index=1, answer="3"),
    ]


def table():
    return [*broken(), row("g0", 1, answer=3, reward=0.0)]


# --- episodes


def test_an_episode_is_found_whatever_the_order_of_its_rows():
    second, first = broken()[::-1]

    [episode] = episodes_of([second, first])

    assert [r.segment_index for r in episode.rows] == [0, 1]
    assert (episode.key, episode.num_actions, episode.num_turns, episode.last) == (("g0", 0), 6, 2, second)


def test_an_error_fails_the_whole_episode():
    episode = EpisodeRows((broken()[0], replace(failed(), segment_index=1)))

    assert (episode.failed, episode.stop_reason, episode.error) == (True, StopReason.ERROR, "ValueError: broken")


def test_a_segment_that_was_cancelled_is_left_out_and_the_episode_goes_on():
    cancelled = replace(broken()[1], stop_reason=StopReason.ABORTED)
    episode = EpisodeRows((broken()[0], cancelled))

    assert (episode.failed, episode.stop_reason, episode.last.segment_index) == (False, StopReason.DONE, 0)
    assert trainable(list(episode.rows), "keep_group") == [episode.rows[0]]
    assert EpisodeRows((cancelled,)).failed


# --- a rollout


def test_a_rollout_counts_episodes():
    rows = [*table(), failed(sample=2)]

    tally = tally_rollout(rows, 1.0)

    assert (tally.samples, tally.failed, tally.tokens, tally.longest) == (3, 1, 9, 6)
    assert (tally.turns, tally.segments) == (3, 4)
    assert tally.stops == {"done": 1, "eos": 1, "error": 1}
    assert tally.metrics()["rollout/length_mean"] == 4.5


def test_a_failed_episode_of_many_segments_is_one_failure():
    lost = [replace(failed(), segment_index=index) for index in range(3)]

    FailureWatch(2).saw(lost)
    with pytest.raises(RunFailedError, match="2 samples failed in a row"):
        FailureWatch(2).saw([*lost, failed(sample=1)])


def test_what_agents_count_is_a_mean_over_the_episodes_that_say_it():
    """Every segment repeats it; a failed episode does not count. Rounds add up, as they come back from JSON."""
    calls = {"agent/calls": 3.0, "agent/loss": -1.0}
    rows = [*broken(metrics=calls), row("g0", 1, metrics={"agent/calls": 0.0}), row("g0", 2), failed(sample=3)]
    first, second = tally_rollout(rows, 1.0), tally_rollout(broken(sample=4, metrics=calls | {"agent/calls": 6.0}), 1.0)

    both = first + RolloutTally(**json.loads(json.dumps(asdict(second))))

    assert (first.metrics()["agent/calls"], both.metrics()["agent/calls"]) == (1.5, 3.0)
    assert both.metrics()["agent/loss"] == -1.0


def test_an_evaluation_says_what_agents_counted():
    rows = [
        *broken(metrics={"agent/calls": 2.0, "of_the_reward": 9.0}),
        row("g1", 0, reward=0.0, metrics={"agent/calls": 1.0}),
    ]

    metrics = evaluation_metrics(rows, config("eval.dataset=h.jsonl", "eval.temperature=1"))

    assert metrics["eval/agent/calls"] == 1.5
    assert "eval/of_the_reward" not in metrics


# --- which rows are trained


def test_all_segments_of_an_episode_with_a_failed_one_are_left_out():
    rows = [broken()[0], replace(failed(), segment_index=1, reward_status=RewardStatus.OK), row("g0", 1, reward=0.0)]

    assert [r.sample_index for r in trainable(rows, "keep_group")] == [1]
    assert trainable(rows, "drop_group") == []


def test_the_filter_sees_one_score_an_episode():
    rows = with_rewards([*broken(), *broken(sample=1)], scored([row("g0", 0), row("g0", 1)], [1.0, 0.0]))

    assert usable_scores(rows, "keep_group") == {"g0": [1.0, 0.0]}


# --- advantages


@pytest.mark.parametrize("estimator", ["group_norm", "rloo", "dr_grpo", "reinforce", "reinforce_baseline"])
def test_a_broken_prefix_changes_no_advantage(estimator):
    """The same six tokens in one row, and in two."""
    whole = [row("g0", 0, answer=6, reward=1.0), row("g0", 1, answer=3, reward=0.0)]

    one, _ = made(whole, f"algo.advantage.estimator={estimator}")
    two, _ = made(table(), f"algo.advantage.estimator={estimator}")

    assert [a for e in two for a in e.advantages[2:]] == pytest.approx([a for e in one for a in e.advantages[2:]])
    assert [(e.reward, e.shaped_reward) for e in two[:2]] == [(one[0].reward, one[0].shaped_reward)] * 2


def test_shaping_counts_episodes_and_all_their_tokens():
    """6 of 8 tokens: 2 into the buffer of 4. The mean of the changes is over two episodes."""
    shaping = ("rollout.max_new_tokens=8", "reward.overlong_buffer_len=4", "algo.advantage.estimator=reinforce")

    _, metrics = made(table(), *shaping)

    assert (metrics["shaping/overlong_mean"], metrics["shaping/overlong_count"]) == (-0.25, 1.0)


# --- evaluations and what people read


def test_an_evaluation_counts_episodes():
    rows = [
        *broken(),
        *broken(0.0, sample=1),
        *broken(1.0, group="g1"),
        row("g1", 1, answer=3, reward=0.0),
        failed("g2"),
    ]
    settings = config("eval.dataset=h.jsonl", "eval.n_samples_per_prompt=2", "eval.temperature=1")

    metrics = evaluation_metrics(rows, settings)

    assert (metrics["eval/prompts"], metrics["eval/failed"]) == (3.0, 1.0)
    assert (metrics["eval/reward_mean"], metrics["eval/length_mean"]) == (0.5, (6 + 6 + 6 + 3) / 4)
    assert (metrics["eval/turns_mean"], metrics["eval/pass@2"]) == (1.75, 1.0)
    assert [outcome["rewards"] for outcome in outcomes(rows)] == [[1.0, 0.0], [1.0, 0.0], [None]]


def test_each_datasource_has_its_own_numbers():
    rows = [*broken(datasource="lake"), row("g1", 0, answer=3, reward=0.5, datasource="guess"), failed("g2")]

    metrics = datasource_metrics([*rows[:3], replace(rows[3], datasource="guess")], threshold=1.0)

    assert metrics == {
        "guess/samples": 2.0,
        "guess/reward_mean": 0.5,
        "guess/length_mean": 3.0,
        "guess/turns_mean": 1.0,
        "guess/score_mean": 0.5,
        "guess/success": 0.0,
        "lake/samples": 1.0,
        "lake/reward_mean": 1.0,
        "lake/length_mean": 6.0,
        "lake/turns_mean": 2.0,
        "lake/score_mean": 1.0,
        "lake/success": 1.0,
    }
    assert datasource_metrics(rows[:2], threshold=1.0) == {}


def test_people_read_an_episode_in_one_row():
    shown = readable(EpisodeRows(tuple(broken())))

    assert (shown["answer"], shown["tokens"], shown["stop"]) == ("[segment 0] 2\n[segment 1] 3", 6, "done")
