import math

import pytest
import torch
from torch import tensor

from rlhf_core.algorithms.losses import (
    POLICY_LOSSES,
    LossInput,
    ValueLossInput,
    policy_loss_named,
    token_ratio,
    value_loss,
)
from rlhf_core.errors import ConfigError

NAMES = ["ppo", "gspo", "cispo"]


def inputs_of(logprobs, old, advantages, mask=None, **rest):
    mask = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask
    return LossInput(logprobs, old, advantages, mask, **rest)


@pytest.mark.golden
def test_ppo():
    """logp -1 everywhere; the 1st and the 4th token are clipped."""
    old, advantages = tensor([[-1.3, -0.6, -1.3, -0.6]]), tensor([[1.0, 1, -1, -1]])

    inputs = inputs_of(torch.full((1, 4), -1.0), old, advantages, eps_low=0.2, eps_high=0.27)
    out = policy_loss_named("ppo")(inputs)

    assert token_ratio(inputs)[0].tolist() == pytest.approx([1.349859, 0.67032] * 2, abs=1e-6)
    assert out.loss_BT[0].tolist() == pytest.approx([-1.27, -0.67032, 1.349859, 0.8], abs=1e-6)
    assert out.loss_BT.mean().item() == pytest.approx(0.052385, abs=1e-6)
    assert (out.clipped_sum / out.num_tokens).item() == 0.5
    assert (out.kl_sum / out.num_tokens).item() == pytest.approx(0.05, abs=1e-6)
    assert out.ratio_sum.item() == pytest.approx(2 * 1.349859 + 2 * 0.67032, abs=1e-5)


@pytest.mark.golden
@pytest.mark.parametrize(("dual_clip", "expected"), [(None, 7.389056), (3.0, 3.0)])
def test_dual_clip(dual_clip, expected):
    out = POLICY_LOSSES["ppo"](inputs_of(tensor([[2.0]]), tensor([[0.0]]), tensor([[-1.0]]), dual_clip=dual_clip))

    assert out.loss_BT.item() == pytest.approx(expected, abs=1e-6)


def test_dual_clip_leaves_positive_advantages():
    out = POLICY_LOSSES["ppo"](inputs_of(tensor([[2.0]]), tensor([[0.0]]), tensor([[1.0]]), dual_clip=3.0))

    assert out.loss_BT.item() == pytest.approx(-1.2)


@pytest.mark.golden
def test_gspo_has_one_ratio_per_sequence():
    out = POLICY_LOSSES["gspo"](
        inputs_of(tensor([[0.2, -0.1, 0.5]]), torch.zeros(1, 3), torch.ones(1, 3), eps_high=0.27)
    )

    assert out.loss_BT[0].tolist() == pytest.approx([-1.221403] * 3, abs=1e-6)


def test_gspo_averages_over_action_tokens_only():
    mask = tensor([[True, False, True], [False, False, False]])

    out = POLICY_LOSSES["gspo"](
        inputs_of(tensor([[0.2, 9.0, 0.1]] * 2), torch.zeros(2, 3), torch.ones(2, 3), mask, eps_high=0.27)
    )

    assert out.loss_BT.tolist() == [pytest.approx([-math.exp(0.15), 0, -math.exp(0.15)]), [0, 0, 0]]


def test_gspo_clips_the_whole_sequence():
    logprobs = tensor([[1.0, 0.0]], requires_grad=True)

    out = POLICY_LOSSES["gspo"](inputs_of(logprobs, torch.zeros(1, 2), torch.ones(1, 2)))
    out.loss_BT.sum().backward()

    assert out.clipped_sum.item() == 2
    assert logprobs.grad.tolist() == [[0, 0]]


def test_cispo_keeps_the_gradient_of_a_capped_token():
    """ratio e², capped at 1.2: the gradient of -1.2 · 2 · logp."""
    logprobs = tensor([[0.0]], requires_grad=True)

    out = POLICY_LOSSES["cispo"](inputs_of(logprobs, tensor([[-2.0]]), tensor([[2.0]])))
    out.loss_BT.sum().backward()

    assert logprobs.grad.item() == pytest.approx(-2.4)
    assert out.clipped_sum.item() == 1


def test_cispo_has_no_lower_cap():
    out = POLICY_LOSSES["cispo"](inputs_of(tensor([[-3.0]]), tensor([[-1.0]]), tensor([[1.0]])))

    assert out.loss_BT.item() == pytest.approx(3 * math.exp(-2))


@pytest.mark.parametrize("name", NAMES)
def test_first_update_has_the_plain_policy_gradient(name):
    """logp == logp_old: the gradient is -A / (tokens of the row for gspo's mean)."""
    logprobs = tensor([[-1.0, -2.0]], requires_grad=True)

    out = POLICY_LOSSES[name](inputs_of(logprobs, logprobs.detach(), tensor([[3.0, 3.0]])))
    out.loss_BT.sum().backward()

    assert logprobs.grad.tolist() == [pytest.approx([-3.0, -3.0])]
    assert (out.clipped_sum.item(), out.kl_sum.item(), out.ratio_sum.item()) == (0, 0, 2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("log_ratio", [500.0, -500.0])
def test_log_ratio_is_clamped(name, log_ratio):
    logprobs = tensor([[log_ratio]], requires_grad=True)

    out = POLICY_LOSSES[name](inputs_of(logprobs, torch.zeros(1, 1), tensor([[-1.0]])))
    out.loss_BT.sum().backward()

    assert out.loss_BT.isfinite().all()
    assert logprobs.grad.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_case_53_nothing_outside_the_mask_reaches_loss_or_gradient(name):
    nan, mask = float("nan"), tensor([[True, False], [False, False]])
    logprobs = tensor([[-1.0, nan], [nan, nan]], requires_grad=True)

    out = POLICY_LOSSES[name](inputs_of(logprobs, tensor([[-1.0, nan]] * 2), tensor([[1.0, nan]] * 2), mask))
    out.loss_BT.sum().backward()

    assert out.loss_BT[~mask].tolist() == [0, 0, 0]
    assert logprobs.grad.tolist() == [[-1, 0], [0, 0]]


@pytest.mark.parametrize("name", NAMES)
def test_sums_add_up_over_micro_batches(name):
    torch.manual_seed(0)
    logprobs, old, advantages, mask = torch.randn(4, 5), torch.randn(4, 5), torch.randn(4, 5), torch.rand(4, 5) < 0.6

    def sums(rows):
        out = POLICY_LOSSES[name](inputs_of(logprobs[rows], old[rows], advantages[rows], mask[rows]))
        return torch.stack([out.loss_BT.sum(), out.num_tokens, out.clipped_sum, out.kl_sum, out.ratio_sum])

    torch.testing.assert_close(sums(slice(0, 1)) + sums(slice(1, 4)), sums(slice(0, 4)))


def test_unknown_loss():
    with pytest.raises(ConfigError, match="unknown policy loss 'pppo': choose one of cispo, gspo, ppo"):
        policy_loss_named("pppo")


@pytest.mark.golden
@pytest.mark.parametrize(("target", "expected", "clipped"), [(0.0, 0.5, 0), (2.0, 0.845, 1)])
def test_value_loss(target, expected, clipped):
    """V = 1, V_old = .2, clip .5."""
    values = [tensor([[v, float("nan")]]) for v in (1.0, 0.2, target)]

    out = value_loss(ValueLossInput(*values, mask_BT=tensor([[True, False]]), clip=0.5))

    assert out.loss_BT[0].tolist() == pytest.approx([expected, 0], abs=1e-6)
    assert (out.clipped_sum.item(), out.num_tokens.item()) == (clipped, 1)
