"""Scoring by a sequence classifier of the tiny model's kind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from rlhf_core.config.model import RunConfig
from rlhf_core.config.trained import DeepSpeedConfig
from rlhf_core.errors import TrainingError
from rlhf_core.training import reward_model

ROWS = [[5, 6, 7], [9] * 40, [1], [8, 3], [2] * 17]


def load(path, param_dtype="fp32", packs=False, **options):
    settings = SimpleNamespace(ds=DeepSpeedConfig(param_dtype=param_dtype, packing_samples=packs), run=RunConfig())
    return reward_model.RewardModel(settings, path, **options)


def classifier(num_labels=1):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 7,  # also the last token of the first row, as where a model pads with its end of sequence
    }
    return LlamaForSequenceClassification(LlamaConfig(**sizes, num_labels=num_labels)).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "model"
    classifier().save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("packs", [False, True])
def test_the_score_is_the_heads_at_the_last_token(folder, packs):
    model = classifier()

    scores = load(folder, packs=packs, micro_batch_size=3).score(ROWS)

    for row, score in zip(ROWS, scores, strict=True):
        hidden_1TH = model.model(torch.tensor([row])).last_hidden_state
        assert score == pytest.approx(float(model.score(hidden_1TH)[0, -1, 0]), abs=1e-5)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 8])
def test_a_row_scores_the_same_alone_and_beside_others(folder, micro_batch_size):
    model = load(folder, micro_batch_size=micro_batch_size)

    together = model.score(ROWS)

    assert together == pytest.approx([model.score([row])[0] for row in ROWS], abs=1e-5)
    assert together == pytest.approx(model.score(ROWS[::-1])[::-1], abs=1e-5)
    assert model.score([]) == []


def test_the_longest_row_is_the_models_own_or_the_shorter_setting(folder):
    assert load(folder).max_len == 64
    assert load(folder, max_len=10).max_len == 10
    assert load(folder, max_len=1000).max_len == 64


def test_bf16_scores_nearly_the_same(folder):
    assert load(folder, param_dtype="bf16").score(ROWS) == pytest.approx(load(folder).score(ROWS), abs=0.05)


def test_what_is_no_reward_model_is_refused(tmp_path, tiny_model):
    """A policy, a classifier of two kinds, a backbone, and nothing at all."""
    classifier(num_labels=2).save_pretrained(tmp_path / "two")
    classifier().model.save_pretrained(tmp_path / "headless")

    for path, named in [
        (str(tiny_model), r"lacks weights of a reward model: score\.weight"),
        (str(tmp_path / "two"), r"score\.weight is \[2, 16\], not \[1, 16\]"),
        (str(tmp_path / "headless"), r"lacks weights of a reward model: score\.weight"),
        (str(tmp_path / "absent"), "cannot load"),
    ]:
        with pytest.raises(TrainingError, match=named):
            load(path)
