"""What reward models and DPO report, by hand; and the padding that an exported reward model names."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import LlamaConfig

from rlhf_core.training.pairwise import DpoTrainer, RewardModelTrainer, name_padding

CHOSEN, REJECTED = [3.0, 1.0, 0.5, 2.0], [1.0, 2.0, 0.5, -1.0]


def sums_of(**more):
    return {"examples": 4.0, "loss": 2.0, "correct": 2.0, "chosen": sum(CHOSEN), "rejected": sum(REJECTED), **more}


def test_reward_model_reports_means_over_pairs_and_the_spread_over_answers():
    scores = np.array([*CHOSEN, *REJECTED])

    metrics = RewardModelTrainer.metrics(sums_of(squares=float((scores**2).sum())))

    assert metrics == {
        "loss": 0.5,
        "accuracy": 0.5,
        "chosen_score": 1.625,
        "rejected_score": 0.625,
        "margin": 1.0,
        "examples": 4,
        "score_mean": pytest.approx(scores.mean()),
        "score_std": pytest.approx(scores.std()),
    }


def test_spread_of_equal_scores_is_not_the_root_of_a_rounding_error():
    equal = {"examples": 3.0, "loss": 0.0, "correct": 0.0, "chosen": 3 * 0.1, "rejected": 3 * 0.1, "squares": 0.06}

    assert RewardModelTrainer.metrics(equal)["score_std"] == pytest.approx(0, abs=1e-8)


def test_scores_that_are_not_finite_are_reported_as_they_are():
    broken = {**sums_of(squares=math.nan), "chosen": math.nan}

    assert math.isnan(RewardModelTrainer.metrics(broken)["score_std"])


def test_dpo_reports_implicit_rewards_and_the_chosen_answers_likelihood():
    metrics = DpoTrainer.metrics(sums_of(chosen_nll=8.0, aux_loss=2.0))

    assert metrics == {
        "loss": 0.5,
        "accuracy": 0.5,
        "chosen_reward": 1.625,
        "rejected_reward": 0.625,
        "margin": 1.0,
        "examples": 4,
        "chosen_nll": 2.0,
        "aux_loss": 0.5,
    }


@pytest.mark.parametrize(
    ("of_model", "of_tokenizer", "expected"),
    [
        (None, 9, 9),  # Llama's configuration names none
        (5, 9, 9),  # rows are padded by the tokenizer
        (5, None, 5),
        (None, None, None),
        (2, 2, None),  # the end token is the padding
        (None, 2, None),
        (None, 3, None),  # another end token of the model
        (None, 4, None),  # the tokenizer's own end
        (None, 32, None),  # no embedding: the folder could not be loaded
    ],
)
def test_padding_is_the_tokenizers_unless_it_ends_answers(of_model, of_tokenizer, expected):
    model = SimpleNamespace(config=LlamaConfig(vocab_size=32, pad_token_id=of_model, eos_token_id=[2, 3]))

    name_padding(model, SimpleNamespace(pad_token_id=of_tokenizer, eos_token_id=4))

    assert model.config.pad_token_id == expected
