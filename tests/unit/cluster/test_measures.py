"""What is reported of each stage."""

import hashlib
import math

import pytest
from cluster_samples import failed, row
from minimal_config import config

from rlhf_core.cluster.measures import (
    RolloutTally,
    evaluation_metrics,
    outcomes,
    readable,
    reward_metrics,
    source_metrics,
    tally_rollout,
)
from rlhf_core.records import EpisodeRows, RewardResult, RewardStatus, StopReason, VersionSpan
from rlhf_core.storage import RewardRow


def result(reward=None, status=RewardStatus.OK, sample=0, **changes):
    return RewardRow("g0", sample, RewardResult(status, reward, reward, **changes))


# --- rollout


def test_a_rollout_in_numbers():
    rows = [row(answer=2), row(sample=1, answer=6, stop=StopReason.LENGTH), failed(sample=2), failed(sample=3)]

    metrics = tally_rollout(rows, seconds=2.0).metrics()

    assert metrics == {
        "rollout/samples": 4.0,
        "rollout/failed": 2.0,
        "rollout/tokens": 8.0,
        "rollout/length_mean": 4.0,
        "rollout/length_max": 6.0,
        "rollout/turns_mean": 1.0,
        "rollout/segments": 4.0,
        "rollout/truncated_share": 0.5,
        "rollout/seconds": 2.0,
        "rollout/tokens_per_second": 4.0,
        "rollout/stop_eos": 0.25,
        "rollout/stop_error": 0.5,
        "rollout/stop_length": 0.25,
    }


def test_rows_of_an_earlier_attempt_count_but_not_for_the_speed():
    metrics = tally_rollout([row(answer=4)], seconds=2.0, found=[row(sample=1, answer=100)]).metrics()

    assert (metrics["rollout/samples"], metrics["rollout/tokens"]) == (2.0, 104.0)
    assert metrics["rollout/tokens_per_second"] == 2.0


@pytest.mark.parametrize("rows", [[], [failed()]])
def test_a_rollout_without_an_answer(rows):
    metrics = tally_rollout(rows, seconds=0.0).metrics()

    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["rollout/tokens"] == 0.0


def test_rounds_are_reported_as_one_rollout():
    rows = [row(answer=2), row(sample=1, answer=6, stop=StopReason.LENGTH), failed(sample=2), row(sample=3, answer=4)]
    rounds = [tally_rollout(rows[:2], 1.0), tally_rollout(rows[3:], 3.0, found=rows[2:3])]

    assert sum(rounds, RolloutTally()).metrics() == tally_rollout(rows, 4.0).metrics()


def test_of_a_replay_it_is_said_which_versions_of_its_source_spoke():
    rows = [row(version_spans=(VersionSpan(2, 4, 5),)), row(sample=1, version_spans=(VersionSpan(2, 4, 3),))]

    assert source_metrics(rows) == {"replay/source_version_min": 3.0, "replay/source_version_max": 5.0}
    assert source_metrics([]) == {}


# --- rewards


def test_rewards_in_numbers():
    rows = [result(1.0), result(0.0, sample=1), result(status=RewardStatus.TIMED_OUT, sample=2)]

    metrics = reward_metrics(rows, seconds=3.0)

    assert (metrics["reward/mean"], metrics["reward/std"], metrics["reward/score_mean"]) == (0.5, 0.5, 0.5)
    assert (metrics["reward/min"], metrics["reward/max"], metrics["reward/seconds"]) == (0.0, 1.0, 3.0)
    assert metrics["reward/timed_out"] == 1.0
    assert "reward/ok" not in metrics


def test_parts_are_averaged_over_the_samples_that_have_them():
    """CASE 103: an extra key on one sample only."""
    rows = [
        result(1.0, metrics={"reward/digits": 1.0}),
        result(0.0, sample=1, metrics={"reward/digits": 0.0, "odd": 5.0}),
    ]

    metrics = reward_metrics(rows, seconds=0.0)

    assert (metrics["reward_log/digits"], metrics["reward_log/odd"]) == (0.5, 5.0)


def test_a_mean_of_nothing_is_left_out_not_nan():
    metrics = reward_metrics([result(status=RewardStatus.ERROR)], seconds=1.0)

    assert metrics == {"reward/seconds": 1.0, "reward/error": 1.0}


def test_a_part_that_is_not_finite_is_left_out():
    metrics = reward_metrics([result(1.0, metrics={"odd": math.nan})], seconds=1.0)

    assert "reward_log/odd" not in metrics


# --- evaluation


def evaluated(rows, *overrides):
    return evaluation_metrics(rows, config("eval.dataset=h.jsonl", *overrides))


def test_success_is_judged_by_the_threshold():
    """CASE 118: rewards [-1, 2], threshold 1: pass@1 .5, pass@2 1, mean reward .5."""
    rows = [row(sample=0, reward=-1.0), row(sample=1, reward=2.0)]

    metrics = evaluated(rows, "eval.n_samples_per_prompt=2", "eval.temperature=1", "eval.success_threshold=1")

    assert (metrics["eval/pass@1"], metrics["eval/pass@2"], metrics["eval/reward_mean"]) == (0.5, 1.0, 0.5)


def test_failed_answers_are_counted_and_left_out_of_the_means():
    rows = [row("g0", reward=1.0, answer=4), failed("g1"), row("g2", reward=0.0, answer=2), row("g3", answer=9)]

    metrics = evaluated(rows)

    assert (metrics["eval/prompts"], metrics["eval/failed"]) == (4.0, 2.0)
    assert (metrics["eval/reward_mean"], metrics["eval/score_mean"], metrics["eval/pass@1"]) == (0.5, 0.5, 0.5)
    assert metrics["eval/length_mean"] == 3.0
    assert metrics["eval/pass@1_stderr"] == pytest.approx(math.sqrt(0.25 / 2))


@pytest.mark.parametrize("rows", [[], [failed()], [row(), row(sample=1)]])
def test_an_evaluation_without_a_score_has_no_means(rows):
    metrics = evaluated(rows)

    assert set(metrics) == {"eval/prompts", "eval/failed"}


def test_a_prompt_with_too_few_samples_left_does_not_count_for_k():
    rows = [row("g0", 0, reward=1.0), row("g0", 1, reward=0.0), row("g1", 0, reward=0.0), failed("g1", 1)]

    metrics = evaluated(rows, "eval.n_samples_per_prompt=2", "eval.temperature=1")

    assert (metrics["eval/pass@1"], metrics["eval/pass@2"]) == (0.25, 1.0)


def test_the_k_that_are_asked_for():
    rows = [row(sample=i, reward=float(i == 0)) for i in range(4)]

    metrics = evaluated(rows, "eval.n_samples_per_prompt=4", "eval.temperature=1", "eval.pass_k=[2]")

    assert [name for name in metrics if "stderr" not in name and "pass" in name] == ["eval/pass@2"]
    assert metrics["eval/pass@2"] == 0.5


def test_several_datasources_are_told_apart():
    rows = [row("g0", reward=1.0), row("g1", reward=0.0, datasource="words")]

    metrics = evaluated(rows)

    assert (metrics["eval/pass@1"], metrics["eval/sums/pass@1"], metrics["eval/words/pass@1"]) == (0.5, 1.0, 0.0)


def test_one_datasource_is_not_told_twice():
    assert "eval/sums/pass@1" not in evaluated([row(reward=1.0)])


# --- readable


def test_the_outcome_of_each_prompt():
    """A failed sample has no value; segments of one sample are one."""
    rows = [
        row(reward=1.0, score=0.5),
        row(reward=1.0, score=0.5, segment_index=1),
        failed(sample=1),
        row(group="g1", reward=0.0, score=0.0),
    ]

    first, second = outcomes(rows)

    assert (first["rewards"], first["scores"]) == ([1.0, None], [0.5, None])
    assert (first["prompt"], second["rewards"]) == (rows[0].prompt_id, [0.0])
    assert first["text_sha256"] == hashlib.sha256(rows[0].prompt.encode()).hexdigest()


def test_a_readable_row():
    shown = readable(EpisodeRows((row("g1", 2, answer=3, reward=1.0),)))

    assert shown == {
        "group": "g1",
        "sample": 2,
        "prompt": "1 + 1 =",
        "answer": "2",
        "label": 2,
        "reward": 1.0,
        "score": 1.0,
        "tokens": 3,
        "logprob": -0.5,
        "stop": "eos",
    }


def test_a_readable_row_of_several_turns_shows_them_all():
    shown = readable(EpisodeRows((row(transcript="1<|end|>\nwrong\n2"),)))

    assert shown["answer"] == "1<|end|>\nwrong\n2"


def test_a_failed_row_says_why():
    shown = readable(EpisodeRows((failed(),)))

    assert (shown["answer"], shown["logprob"], shown["reward"]) == ("[failed] ValueError: broken", None, None)
