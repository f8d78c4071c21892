"""SFT's loss and metrics, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_core.batching import OptimizerStep, TokenBatch
from rlhf_core.config.supervised import SupervisedTrainConfig
from rlhf_core.training.model import TokenScores
from rlhf_core.training.sft import SUMS, SftTrainer, sft_loss

MASK_BT = torch.tensor([[False, True, True, False], [False, True, True, True]])
LOGPROBS_BT = torch.tensor([[0.0, -1, -2, 0], [0.0, -3, -4, -5]])


def loss_of(logprobs_BT, aux_loss=None, **train):
    """Of two rows in a step of 10 tokens and 4 rows."""
    batch = TokenBatch(torch.zeros(2, 4, dtype=torch.long), MASK_BT, torch.ones(2))
    step = OptimizerStep(epoch=0, micro_batches=(), num_tokens=10, num_sequences=4)
    scores = TokenScores(logprobs_BT, None, aux_loss)
    return sft_loss(SupervisedTrainConfig(**train), step, batch, scores)


@pytest.mark.golden
@pytest.mark.parametrize(("mode", "expected"), [("token", 15 / 10), ("sample", (1.5 + 4) / 4)])
def test_loss_is_divided_by_the_counts_of_the_whole_step(mode, expected):
    part = loss_of(LOGPROBS_BT, loss_agg_mode=mode)

    assert part.loss.item() == pytest.approx(expected)
    assert dict(zip(SUMS, part.sums.tolist(), strict=True)) == {
        "examples": 2,
        "tokens": 5,
        "nll": 15,
        "aux_loss": 0,
    }


def test_what_stands_outside_the_answers_reaches_neither_loss_nor_gradient():
    logprobs_BT = LOGPROBS_BT.masked_fill(~MASK_BT, torch.nan).requires_grad_()

    part = loss_of(logprobs_BT)
    part.loss.backward()

    assert part.sums.isfinite().all()
    assert torch.equal(logprobs_BT.grad, torch.where(MASK_BT, -0.1, 0.0))


def test_balancing_loss_counts_by_the_share_of_the_rows():
    plain = loss_of(LOGPROBS_BT, torch.tensor(3.0))
    balanced = loss_of(LOGPROBS_BT, torch.tensor(3.0), aux_loss_coef=0.1)

    assert (balanced.loss - plain.loss).item() == pytest.approx(0.1 * 3 * 2 / 4)
    assert balanced.sums[SUMS.index("aux_loss")] == 3 * 2


def test_metrics_are_means():
    metrics = SftTrainer.metrics({"examples": 4.0, "tokens": 10.0, "nll": 20.0, "aux_loss": 6.0})

    assert metrics == {
        "loss": 2,
        "perplexity": pytest.approx(math.exp(2)),
        "tokens": 10,
        "examples": 4,
        "aux_loss": 1.5,
    }


def test_balancing_loss_that_was_not_wanted_is_not_reported():
    assert "aux_loss" not in SftTrainer.metrics({"examples": 4.0, "tokens": 10.0, "nll": 20.0, "aux_loss": 0.0})


@pytest.mark.parametrize(("nll", "expected"), [(1e4, math.inf), (math.nan, math.nan)])
def test_perplexity_of_a_broken_model_is_a_number(nll, expected):
    metrics = SftTrainer.metrics({"examples": 1.0, "tokens": 1.0, "nll": nll, "aux_loss": 0.0})

    assert metrics["perplexity"] == pytest.approx(expected, nan_ok=True)
