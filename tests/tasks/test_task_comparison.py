"""Champion and challenger by the evaluations of one run.

version   scores of the held-out prompts, two samples each
0         a: 0.0 0.2    b: 0.5 0.5        mean 0.3
1         a: 0.4 0.6    b: 0.5 0.7        mean 0.55
2         a: 0.1 0.1    b: 0.5 0.5        mean 0.3
"""

from types import SimpleNamespace

import pytest

from rlhf_core.config import parse_retrain_config, plan_turn
from rlhf_core.errors import RunFailedError, StorageError
from rlhf_core.storage import RunStore
from rlhf_core.storage.retrain_log import TurnRecord
from tasks.comparison import compared, question

TRAINING = {
    "actor": {"model_name_or_path": "builtin:tiny"},
    "data": {"prompt_dataset": "p.jsonl"},
    "reward": {"functions": [{"use": "digits"}]},
    "eval": {"dataset": "h.jsonl"},
}
TURN = TurnRecord(3, "bot-0003", "f", "run:s3://b/runs/bot-0002@4", "champion", 2, "rows.json", 2, "2026")
SCORES = {
    0: {"a": [0.0, 0.2], "b": [0.5, 0.5]},
    1: {"a": [0.4, 0.6], "b": [0.5, 0.7]},
    2: {"a": [0.1, 0.1], "b": [0.5, 0.5]},
}


@pytest.fixture
def store(tmp_path):
    return RunStore("bot-0003", str(tmp_path))


def retraining(store, *overrides):
    config = parse_retrain_config({"name": "bot", "config": TRAINING, "margin": 0.2}, overrides)
    return SimpleNamespace(config=config, training=plan_turn(config), run_store=lambda turn: store)


def evaluated(store, scores=SCORES, end=1):
    for version, of_version in scores.items():
        outcomes = [
            {"prompt": prompt, "text_sha256": "t", "scores": samples, "rewards": [1.0] * len(samples)}
            for prompt, samples in of_version.items()
        ]
        store.write_evaluation(version, {"version": version, "outcomes": outcomes})
    store.write_end(end)


def test_prompt_by_prompt(store):
    evaluated(store)

    found = compared(retraining(store), TURN)

    assert (found.champion, found.challenger, found.better) == (TURN.start, "run:bot-0003@1", True)
    assert (found.numbers.champion, found.numbers.challenger) == (pytest.approx(0.3), pytest.approx(0.55))
    assert found.numbers.standard_error == pytest.approx(0.15)  # differences 0.4 and 0.1
    assert found.sentence == (
        "eval/score_mean 0.55 against the champion's 0.3: +0.2500 ± 0.15 on 2 prompts, margin 0.2 met"
    )


def test_the_standard_error_may_be_asked_for(store):
    evaluated(store)

    found = compared(retraining(store, "standard_errors=2"), TURN)

    assert not found.better
    assert found.sentence.endswith("margin 0.2 and 2 standard errors not met")


def test_the_reward_may_be_compared(store):
    evaluated(store)

    assert compared(retraining(store, "metric=eval/reward_mean"), TURN).numbers.difference == 0


@pytest.mark.parametrize(("key", "version"), [("null", 2), ("eval/score_mean", 1)])
def test_the_challenger_is_the_last_version_or_the_best(store, key, version):
    evaluated(store, end=2)
    store.set_pointer("best", {"version": 1, "value": 0.55, "key": "eval/score_mean"})

    assert compared(retraining(store, f"ckpt.best_metric_key={key}"), TURN).challenger_version == version


def test_failed_samples_and_prompts_without_a_score_are_left_out(store):
    evaluated(store, {0: {"a": [None, 0.2], "b": [None, None]}, 1: {"a": [0.4, 0.6], "b": [0.5, 0.7]}})

    found = compared(retraining(store), TURN)

    assert (found.left_out, found.numbers.prompts, found.numbers.difference) == (1, 1, pytest.approx(0.3))


@pytest.mark.parametrize(
    ("scores", "error", "problem"),
    [
        (
            {0: SCORES[0], 1: {"a": [0.4, 0.6], "c": [1.0, 1.0]}},
            StorageError,
            "different prompts: eval.dataset changed",
        ),
        ({0: {"a": [None]}, 1: {"a": [0.5]}}, RunFailedError, "on no held-out prompt in common"),
        ({0: SCORES[0]}, StorageError, "version 1 of .* has no evaluation with the outcome of each prompt"),
        ({0: {}, 1: SCORES[1]}, StorageError, "version 0 of .* has no evaluation"),
    ],
)
def test_what_cannot_be_compared_is_said(store, scores, error, problem):
    evaluated(store, scores)

    with pytest.raises(error, match=problem):
        compared(retraining(store), TURN)


def test_the_question_shows_both(store):
    evaluated(store)
    found = compared(retraining(store), TURN)

    shown = question(retraining(store), TURN, found).splitlines()

    assert shown[0] == "# Promote turn 3 of bot?"
    assert "| challenger | 0.5500 | 2 prompts | `run:bot-0003@1` |" in shown
    assert shown[-1] == "Answers of both are in the artifact `bot-0003-evaluation`."
