"""A loss of a user's file in the objective: aggregated, corrected and counted like the built-in ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import training_batches as tb

from rlhf_core.training.model import TokenScores
from rlhf_core.training.objective import SUMS, micro_batch_loss

EXAMPLE = Path(__file__).parents[3] / "configs" / "algorithms" / "example.py"


def loss_of(*overrides):
    """Two rows of one and three tokens at ratio 1, where the example's loss is -2 A."""
    config = tb.config(f"actor.policy_loss_type={EXAMPLE}:sapo", *overrides)
    rows = [tb.experience([-1.0], advantage=1.0), tb.experience([-1.0] * 3, advantage=2.0)]
    logprobs_BT = tb.padded([-1], [-1] * 3)
    part = micro_batch_loss(
        config, tb.step_of(*rows), tb.batch_of(*rows), TokenScores(logprobs_BT, torch.zeros_like(logprobs_BT)), 0.0
    )
    part.loss.backward()
    return part, logprobs_BT.grad


@pytest.mark.parametrize(
    ("overrides", "loss", "gradient"),
    [
        ([], -(2 + 3 * 4) / 4, [-1 / 4, -2 / 4]),  # the default is the mean over tokens
        (["actor.loss_agg_mode=sample"], -(2 + 4) / 2, [-1 / 2, -2 / 6]),
        (["algo.advantage.estimator=dr_grpo", "rollout.max_new_tokens=10"], -(2 + 3 * 4) / 20, [-1 / 20, -2 / 20]),
    ],
)
def test_every_aggregation(overrides, loss, gradient):
    part, grad_BT = loss_of(*overrides)

    assert part.loss.item() == pytest.approx(loss)
    assert [grad_BT[0, 1].item(), grad_BT[1, 1].item()] == pytest.approx(gradient)
    assert dict(zip(SUMS, part.sums.tolist(), strict=True))["ratio"] == 4
