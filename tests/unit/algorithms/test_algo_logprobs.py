"""``chunked_logprobs`` against log_softmax over the full logits, for output layers with and without a bias."""

import pytest
import torch
from torch import tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf_core.algorithms.logprobs import chunked_logprobs
from rlhf_core.algorithms.losses import POLICY_LOSSES, LossInput

N, H, V = 13, 6, 50
TEMPERATURES = [1.0, 0.5, torch.linspace(0.5, 1.5, N)]


@pytest.fixture(params=[False, True], ids=["plain", "bias"])
def layer(request):
    """hidden [N, H], weight [V, H], bias [V] or None."""
    return data(request.param)


def data(with_bias=False, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((N, H), (V, H), (V,)))
    tensors = (hidden, weight, bias) if with_bias else (hidden, weight)
    return [x.requires_grad_() for x in tensors] + [None] * (not with_bias)


TARGETS = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(1))


def naive(hidden, weight, bias, temperature):
    temperature = temperature.unsqueeze(1) if isinstance(temperature, torch.Tensor) else temperature
    logp = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias).float() / temperature, dim=1)
    return logp.gather(1, TARGETS.unsqueeze(1)).squeeze(1), -(logp.exp() * logp).sum(1)


def gradients(logprobs, entropy, layer):
    """Of a loss that weighs each token differently, and not at all what is None."""
    scale = torch.linspace(-1, 1, N)
    loss = (0 if logprobs is None else (logprobs * scale).sum()) + (
        0 if entropy is None else (entropy * scale.flip(0)).sum()
    )
    return torch.autograd.grad(loss, [x for x in layer if x is not None])


@pytest.mark.parametrize("temperature", TEMPERATURES, ids=["1", "half", "per token"])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_equals_full_logits_forward_and_backward(layer, temperature, chunk):
    expected = naive(*layer, temperature)

    out = chunked_logprobs(*layer, TARGETS, temperature, chunk, want_entropy=True)

    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients(*out, layer), gradients(*expected, layer), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("unused", [0, 1], ids=["log-probs", "entropy"])
def test_an_output_that_the_loss_leaves_out_has_no_part_in_the_gradient(layer, unused):
    out = list(chunked_logprobs(*layer, TARGETS, 0.7, 4, want_entropy=True))
    expected = list(naive(*layer, 0.7))
    out[unused] = expected[unused] = None

    torch.testing.assert_close(gradients(*out, layer), gradients(*expected, layer), atol=1e-5, rtol=1e-5)


def test_without_entropy(layer):
    expected, _ = naive(*layer, 1.0)

    logprobs, entropy = chunked_logprobs(*layer, TARGETS, 1.0, 4, want_entropy=False)

    assert entropy is None
    torch.testing.assert_close(gradients(logprobs, None, layer), gradients(expected, None, layer), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("with_bias", [False, True])
def test_bf16_hidden_states_are_scored_in_fp32(with_bias):
    layer = data(with_bias, torch.bfloat16)
    expected = naive(*layer, 0.7)

    out = chunked_logprobs(*layer, TARGETS, 0.7, 4, want_entropy=True)

    assert out[0].dtype == out[1].dtype == torch.float32
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(gradients(*out, layer), gradients(*expected, layer), strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), theirs.float(), atol=0.02 * theirs.abs().max().item(), rtol=0)


def test_no_grad(layer):
    with torch.no_grad():
        logprobs, _ = chunked_logprobs(*layer, TARGETS, 1.0, 4, want_entropy=False)

    assert not logprobs.requires_grad
    torch.testing.assert_close(logprobs, naive(*layer, 1.0)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("frozen", ["hidden", "output layer"])
def test_what_is_frozen_gets_no_gradient(frozen):
    hidden, weight, bias = data(with_bias=True)
    expected = gradients(naive(hidden, weight, bias, 1.0)[0], None, (hidden, weight, bias))
    if frozen == "hidden":
        hidden = hidden.detach()
    else:
        weight, bias = weight.detach(), bias.detach()

    logprobs, _ = chunked_logprobs(hidden, weight, bias, TARGETS, 1.0, 4, want_entropy=False)
    (logprobs * torch.linspace(-1, 1, N)).sum().backward()

    found = (hidden.grad, weight.grad, bias.grad)
    assert [x is None for x in found] == ([True, False, False] if frozen == "hidden" else [False, True, True])
    for ours, theirs in zip(found, expected, strict=True):
        if ours is not None:
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_no_tokens(layer):
    hidden, weight, bias = layer

    out = chunked_logprobs(hidden[:0], weight, bias, TARGETS[:0], 1.0, 4, want_entropy=True)
    (out[0].sum() + out[1].sum()).backward()

    assert out[0].shape == (0,)
    assert not weight.grad.any()
    assert bias is None or not bias.grad.any()


def test_huge_logits_stay_finite():
    hidden, weight = tensor([[1e4]], requires_grad=True), tensor([[1.0], [-1.0]])

    logprobs, entropy = chunked_logprobs(hidden, weight, None, tensor([1]), 1.0, 1, want_entropy=True)
    (logprobs + entropy).sum().backward()

    assert (logprobs.item(), entropy.item(), hidden.grad.item()) == (-2e4, 0, -2)


@pytest.mark.golden
def test_case_66_entropy_is_that_of_the_sampled_distribution():
    """Temperature .7, logits [2, 1, 0]: softmax(logits / .7), and the bonus of .01 has a gradient."""
    weight = tensor([[2.0], [1.0], [0.0]], requires_grad=True)
    p = torch.softmax(tensor([2.0, 1, 0]) / 0.7, 0)

    _, entropy = chunked_logprobs(tensor([[1.0]]), weight, None, tensor([0]), 0.7, 1, want_entropy=True)
    (-0.01 * entropy.sum()).backward()

    assert entropy.item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-6)
    expected = 0.01 * p * (p.log() + entropy.detach()) / 0.7
    torch.testing.assert_close(weight.grad.flatten(), expected, atol=1e-6, rtol=0)


@pytest.mark.golden
def test_case_62_first_update_at_temperature_half_has_ratio_one(layer):
    """Old log-probs come from other tiles, without gradients."""
    with torch.no_grad():
        old, _ = chunked_logprobs(*layer, TARGETS, 0.5, 3, want_entropy=False)
    new, _ = chunked_logprobs(*layer, TARGETS, 0.5, 100, want_entropy=True)

    ones = torch.ones(1, N)
    out = POLICY_LOSSES["ppo"](LossInput(new.unsqueeze(0), old.unsqueeze(0), ones, ones.bool()))

    torch.testing.assert_close(-out.loss_BT, ones, atol=1e-5, rtol=0)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.elements = max(self.elements, *made, 0)
        return result


@pytest.mark.parametrize(("chunk", "columns"), [(4096, 50), (16384, 128)], ids=["asked", "enough for a CPU"])
def test_no_tensor_is_larger_than_a_tile(chunk, columns):
    """16384 tokens, 200 columns."""
    hidden, weight = torch.ones(16384, 1, requires_grad=True), torch.ones(200, 1, requires_grad=True)
    targets = torch.zeros(16384, dtype=torch.long)

    with LargestTensor() as seen:
        out = chunked_logprobs(hidden, weight, None, targets, 1.0, chunk, want_entropy=True)
        (out[0].sum() + out[1].sum()).backward()

    assert seen.elements == 16384 * columns


def test_gradient_of_the_output_layer_arrives_once():
    """A hook per parameter (as ZeRO's) must not fire per tile."""
    hidden, weight, _ = data()
    fired = []
    weight.register_post_accumulate_grad_hook(lambda parameter: fired.append(parameter.shape))

    chunked_logprobs(hidden, weight, None, TARGETS, 1.0, 4, want_entropy=True)[0].sum().backward()

    assert fired == [(V, H)]
