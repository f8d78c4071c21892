"""Losses and corrections against a plain loop over tokens; and no way to cut a step into micro-batches that shows."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.algorithms.aggregation import aggregate, count_targets
from rlhf_core.algorithms.corrections import CORRECTIONS, CorrectionInput, correct
from rlhf_core.algorithms.losses import POLICY_LOSSES, LossInput

pytestmark = pytest.mark.golden

EXAMPLES = settings(max_examples=15, deadline=None, derandomize=True)
every_loss = pytest.mark.parametrize("name", list(POLICY_LOSSES))


@st.composite
def steps(draw):
    """Rows of one optimizer step: random masks, one number per token, and a cut into micro-batches."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_rows, width = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    mask = rng.random((num_rows, width)) < rng.choice([0.0, 0.5, 1.0], size=(num_rows, 1), p=[0.1, 0.6, 0.3])
    logprobs, old, rollout, advantages = rng.normal(size=(4, num_rows, width))
    cut = rng.integers(0, draw(st.integers(1, num_rows)), size=num_rows)
    return SimpleNamespace(
        mask=mask,
        logprobs=-1 + logprobs / 2,
        old=-1 + old / 2,
        rollout=-1 + rollout / 2,
        advantages=advantages,
        micro_batches=[rows for part in range(num_rows) if len(rows := np.flatnonzero(cut == part))],
        dual_clip=draw(st.sampled_from([None, 1.5, 3.0])),
    )


def tensors(step, *names):
    return [torch.from_numpy(getattr(step, name)).float() for name in names]


def loss_input(step, logprobs_BT, old_BT, advantages_BT, mask_BT):
    return LossInput(logprobs_BT, old_BT, advantages_BT, mask_BT, eps_low=0.2, eps_high=0.27, dual_clip=step.dual_clip)


def loss_of_token(name, log_ratio, mean_log_ratio, logprob, advantage, dual_clip):
    """By the formulas of ALGORITHMS section 3, for one number at a time."""
    ratio = math.exp(mean_log_ratio if name == "gspo" else log_ratio)
    if name == "cispo":
        return -min(ratio, 1.27) * advantage * logprob
    objective = min(ratio * advantage, min(max(ratio, 0.8), 1.27) * advantage)
    if dual_clip is not None and advantage < 0:
        objective = max(objective, dual_clip * advantage)
    return -objective


@every_loss
@EXAMPLES
@given(step=steps())
def test_loss_equals_a_plain_loop(name, step):
    expected = np.zeros(step.mask.shape)
    for row, mask in enumerate(step.mask):
        log_ratio = step.logprobs[row] - step.old[row]
        for t in np.flatnonzero(mask):
            expected[row, t] = loss_of_token(
                name,
                log_ratio[t],
                log_ratio[mask].mean(),
                step.logprobs[row, t],
                step.advantages[row, t],
                step.dual_clip,
            )

    inputs = loss_input(step, *tensors(step, "logprobs", "old", "advantages"), torch.from_numpy(step.mask))

    np.testing.assert_allclose(POLICY_LOSSES[name](inputs).loss_BT, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", list(CORRECTIONS))
@EXAMPLES
@given(step=steps())
def test_correction_equals_a_plain_loop(kind, step):
    """ALGORITHMS section 4, with the range [.5, 1.5]."""
    expected = np.ones(step.mask.shape)
    for row, mask in enumerate(step.mask):
        log_weight = step.old[row] - step.rollout[row]
        for t in np.flatnonzero(mask):
            weight = math.exp(log_weight[t])
            judged = weight if kind == "icepop" else math.exp(log_weight[mask].mean())
            kept = kind == "tis" or 0.5 <= judged <= 1.5
            expected[row, t] = kept * (weight if kind == "icepop" else min(max(weight, 0.5), 1.5))

    out = correct(CorrectionInput(*tensors(step, "old", "rollout"), torch.from_numpy(step.mask), 0.5, 1.5), kind)

    np.testing.assert_allclose(out.factor_BT, expected, atol=1e-6, rtol=1e-5)


@every_loss
@pytest.mark.parametrize("mode", ["token", "sample", "constant_length"])
@EXAMPLES
@given(step=steps())
def test_case_55_micro_batches_and_padding_do_not_show(name, mode, step):
    """Loss and gradient of a linear model: all rows at once, and cut at random with more padding in every part."""
    mask_BT = torch.from_numpy(step.mask)
    num_tokens, num_sequences = count_targets(mask_BT)

    def loss_and_gradient(parts, extra):
        weight = torch.tensor([0.7, -0.2], requires_grad=True)
        total = torch.zeros(())
        for rows in parts:
            old, advantages, one, two = (
                torch.nn.functional.pad(values_BT[rows], (0, extra), value=value)
                for values_BT, value in zip(
                    tensors(step, "old", "advantages", "logprobs", "rollout"), (9.0, 9.0, 1.0, 1.0), strict=True
                )
            )
            mask = torch.nn.functional.pad(mask_BT[rows], (0, extra))
            token_loss = POLICY_LOSSES[name](loss_input(step, one * weight[0] + two * weight[1], old, advantages, mask))
            part = aggregate(
                token_loss.loss_BT, mask, mode, num_tokens=num_tokens, num_sequences=num_sequences, length=12
            )
            part.backward()
            total += part.detach()
        return total, weight.grad

    whole = loss_and_gradient([np.arange(len(step.mask))], 0)
    cut = loss_and_gradient(step.micro_batches, 3)

    torch.testing.assert_close(cut, whole, atol=1e-6, rtol=1e-5)
