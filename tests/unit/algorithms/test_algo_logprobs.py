"""``chunked_logprobs`` against log_softmax over the full logits, for both kinds of output layer."""

import pytest
import torch
from torch import tensor

from rlhf_core.algorithms.logprobs import chunked_logprobs
from rlhf_core.algorithms.losses import POLICY_LOSSES, LossInput

N, H, V = 13, 6, 50
KINDS = ["function", "weight"]
TEMPERATURES = [1.0, 0.5, torch.linspace(0.5, 1.5, N)]


def layer_of(kind, weight):
    return weight if kind == "weight" else lambda hidden: hidden @ weight.T


def data(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (N,), generator=generator)


def naive(hidden, weight, targets, temperature):
    temperature = temperature.unsqueeze(1) if isinstance(temperature, torch.Tensor) else temperature
    logp = torch.log_softmax((hidden @ weight.T).float() / temperature, dim=1)
    return logp.gather(1, targets.unsqueeze(1)).squeeze(1), -(logp.exp() * logp).sum(1)


def gradients(logprobs, entropy, hidden, weight):
    scale = torch.linspace(-1, 1, N)
    loss = (logprobs * scale).sum() + (0 if entropy is None else (entropy * scale.flip(0)).sum())
    return torch.autograd.grad(loss, [hidden, weight])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", TEMPERATURES, ids=["1", "half", "per token"])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_equals_full_logits_forward_and_backward(kind, temperature, chunk):
    hidden, weight, targets = data()
    expected = naive(hidden, weight, targets, temperature)

    out = chunked_logprobs(hidden, layer_of(kind, weight), targets, temperature, chunk, want_entropy=True)

    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        gradients(*out, hidden, weight), gradients(*expected, hidden, weight), atol=2e-5, rtol=1e-5
    )


@pytest.mark.parametrize("kind", KINDS)
def test_without_entropy(kind):
    hidden, weight, targets = data()
    expected, _ = naive(hidden, weight, targets, 1.0)

    logprobs, entropy = chunked_logprobs(hidden, layer_of(kind, weight), targets, 1.0, 4, want_entropy=False)

    assert entropy is None
    torch.testing.assert_close(
        gradients(logprobs, None, hidden, weight), gradients(expected, None, hidden, weight), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_hidden_states_are_scored_in_fp32(kind):
    hidden, weight, targets = data(torch.bfloat16)
    expected = naive(hidden, weight, targets, 0.7)

    out = chunked_logprobs(hidden, layer_of(kind, weight), targets, 0.7, 4, want_entropy=True)

    assert out[0].dtype == out[1].dtype == torch.float32
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert all(g.dtype == torch.bfloat16 for g in gradients(*out, hidden, weight))


@pytest.mark.parametrize("kind", KINDS)
def test_no_grad(kind):
    hidden, weight, targets = data()

    with torch.no_grad():
        logprobs, _ = chunked_logprobs(hidden, layer_of(kind, weight), targets, 1.0, 4, want_entropy=False)

    assert not logprobs.requires_grad
    torch.testing.assert_close(logprobs, naive(hidden, weight, targets, 1.0)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_output_layer(kind):
    hidden, weight, targets = data()

    logprobs, _ = chunked_logprobs(hidden, layer_of(kind, weight.detach()), targets, 1.0, 4, want_entropy=False)
    logprobs.sum().backward()

    assert hidden.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens(kind):
    hidden, weight, targets = data()

    out = chunked_logprobs(hidden[:0], layer_of(kind, weight), targets[:0], 1.0, 4, want_entropy=True)
    (out[0].sum() + out[1].sum()).backward()

    assert out[0].shape == (0,)
    assert not weight.grad.any()


@pytest.mark.parametrize("kind", KINDS)
def test_huge_logits_stay_finite(kind):
    hidden, weight, targets = tensor([[1e4]], requires_grad=True), tensor([[1.0], [-1.0]]), tensor([1])

    logprobs, entropy = chunked_logprobs(hidden, layer_of(kind, weight), targets, 1.0, 1, want_entropy=True)
    (logprobs + entropy).sum().backward()

    assert (logprobs.item(), entropy.item(), hidden.grad.item()) == (-2e4, 0, -2)


@pytest.mark.golden
@pytest.mark.parametrize("kind", KINDS)
def test_case_66_entropy_is_that_of_the_sampled_distribution(kind):
    """Temperature .7, logits [2, 1, 0]: softmax(logits / .7), and the bonus of .01 has a gradient."""
    weight = tensor([[2.0], [1.0], [0.0]], requires_grad=True)
    p = torch.softmax(tensor([2.0, 1, 0]) / 0.7, 0)

    _, entropy = chunked_logprobs(tensor([[1.0]]), layer_of(kind, weight), tensor([0]), 0.7, 1, want_entropy=True)
    (-0.01 * entropy.sum()).backward()

    assert entropy.item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-6)
    expected = 0.01 * p * (p.log() + entropy.detach()) / 0.7
    torch.testing.assert_close(weight.grad.flatten(), expected, atol=1e-6, rtol=0)


@pytest.mark.golden
@pytest.mark.parametrize("kind", KINDS)
def test_case_62_first_update_at_temperature_half_has_ratio_one(kind):
    """Old log-probs come from another chunking, without gradients."""
    hidden, weight, targets = data()
    with torch.no_grad():
        old, _ = chunked_logprobs(hidden, layer_of(kind, weight), targets, 0.5, 3, want_entropy=False)
    new, _ = chunked_logprobs(hidden, layer_of(kind, weight), targets, 0.5, 100, want_entropy=True)

    ones = torch.ones(1, N)
    out = POLICY_LOSSES["ppo"](LossInput(new.unsqueeze(0), old.unsqueeze(0), ones, ones.bool()))

    torch.testing.assert_close(-out.loss_BT, ones, atol=1e-5, rtol=0)


def test_output_layer_sees_only_chunks():
    hidden, weight, targets = data()
    seen = []

    def layer(rows):
        seen.append(len(rows))
        return rows @ weight.T

    chunked_logprobs(hidden, layer, targets, 1.0, 4, want_entropy=False)[0].sum().backward()

    assert seen == [4, 4, 4, 1, *seen[4:]]
    assert sorted(seen[4:]) == [1, 4, 4, 4]


def test_gradient_of_the_output_layer_arrives_once():
    """A hook per parameter (as ZeRO's) must not fire per chunk."""
    hidden, _, targets = data()
    layer, fired = torch.nn.Linear(H, V), []
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: fired.append(parameter.shape))

    chunked_logprobs(hidden, layer, targets, 1.0, 4, want_entropy=True)[0].sum().backward()

    assert fired == [(V, H)]
