"""Log-probs without the full logits, at the sizes for which they are made."""

import pytest
import torch

from rlhf_core.algorithms.logprobs import chunked_logprobs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

TOKENS, HIDDEN, VOCABULARY, CHUNK = 4096, 1024, 151_936, 512
FULL_LOGITS = 4 * TOKENS * VOCABULARY  # bytes in fp32


def made(dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, device="cuda").to(dtype)
    weight = (torch.randn(VOCABULARY, HIDDEN, generator=generator, device="cuda") / HIDDEN**0.5).to(dtype)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator, device="cuda")
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def whole(hidden, weight, targets):
    logits = (hidden @ weight.T).float() / 0.7
    return torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)])
def test_values_and_gradients_are_those_of_the_full_logits(dtype, tolerance):
    hidden, weight, targets = made(dtype)
    expected = whole(hidden, weight, targets)
    wanted = torch.autograd.grad(expected.mean(), (hidden, weight))

    found, _ = chunked_logprobs(hidden, weight, None, targets, 0.7, CHUNK, want_entropy=False)
    gradients = torch.autograd.grad(found.mean(), (hidden, weight))

    assert (found - expected).abs().max() < tolerance
    for gradient, other in zip(gradients, wanted, strict=True):
        assert (gradient - other).abs().max() < tolerance * other.abs().max()


def test_the_full_logits_are_never_held():
    hidden, weight, targets = made(torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    found, _ = chunked_logprobs(hidden, weight, None, targets, 0.7, CHUNK, want_entropy=True)
    found.mean().backward()

    gradients = hidden.grad.nbytes + weight.grad.nbytes
    assert torch.cuda.max_memory_allocated() - before - gradients < FULL_LOGITS / 2
