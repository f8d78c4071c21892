"""Log-probs and entropies of chosen tokens without the full logits, backward too.

N × V floats are the largest tensor of a training step by far (4096 × 151936 in fp32: 2.3 GiB, and autograd keeps
several). Here the vocabulary is walked through in tiles, twice::

    forward     hidden [N, H] ─▶ logits [N, width] ─▶ running softmax        all tokens of a few columns
    backward    hidden [N, H] ─▶ the same logits again ─▶ their gradient ─▶ += gradient of hidden
                                                                         ─▶ gradient of the same rows of the weight

The price is one more product of hidden and weight, four instead of three. In exchange a tile stays near the processor,
where the full logits go to memory and back in every step of the softmax: the sum is about even
(``python -m benchmarks.logprobs``). Tiles of columns rather than of tokens, because each then makes its own rows of the
weight's gradient, where a tile of tokens would add to all of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from rlhf_core.algorithms.softmax_tiles import RunningSoftmax, SoftmaxGradient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

# Floats of a tile. On CPU 8 MiB: from there on matrix products run at full speed, and three such tiles are little memory.
# On GPU 128 MiB: each kernel works for many times longer than its launch takes.
CPU_TILE = 1 << 21
GPU_TILE = 1 << 25
MIN_WIDTH = 128  # columns: narrower products are slow; so many floats a token are less than its hidden state


def chunked_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    temperature: float | Tensor,
    chunk: int,
    want_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """fp32 ``(logprobs [N], entropy [N] or None)`` of ``softmax(logits / temperature)``: what was sampled from.

    Args:
        hidden_NH: last hidden states, any float type; row n predicts ``targets_N[n]``.
        weight_VH: of the output layer, in the type of ``hidden_NH``.
        bias_V: of the output layer.
        targets_N: chosen tokens.
        temperature: one number, or ``[N]``.
        chunk: at most so many tokens' worth of logits exist at a time; fewer where the device gains nothing from more.
        want_entropy: None instead of entropies saves a pass.
    """
    temperature_N = torch.as_tensor(temperature, dtype=torch.float32, device=hidden_NH.device).expand(len(hidden_NH))
    width = _tile_width(len(hidden_NH), len(weight_VH), chunk, hidden_NH.device.type)
    logprobs_N, entropy_N = _Score.apply(hidden_NH, weight_VH, bias_V, targets_N, temperature_N, width, want_entropy)
    return logprobs_N, entropy_N if want_entropy else None


class _Score(torch.autograd.Function):  # type: ignore[misc]
    """Keeps no logits.

    The weight that is saved is the parameter itself, not a copy: under ZeRO-3 its values are gone between the passes
    and come back before the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature_N: Tensor,
        width: int,
        want_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        softmax = RunningSoftmax.of(targets_N)
        for start, stop in _spans(len(weight_VH), width):
            tile_NV = _scaled_logits(hidden_NH, weight_VH, bias_V, start, stop, temperature_N)
            softmax.add(tile_NV, start, want_entropy)
        entropy_N = softmax.entropy_N if want_entropy else torch.zeros_like(softmax.chosen_N)
        if not want_entropy:
            ctx.mark_non_differentiable(entropy_N)
        ctx.set_materialize_grads(False)  # a gradient is None where an output is not used: an update without a bonus
        ctx.width = width
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, temperature_N, softmax.logsumexp_N, entropy_N)
        return softmax.logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_logprobs_N: Tensor | None, grad_entropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, temperature_N, logsumexp_N, entropy_N = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # Divided by the temperature here, once a token, the tiles' gradients are those of the unscaled logits.
        gradient = SoftmaxGradient(
            targets_N,
            logsumexp_N,
            torch.zeros_like(logsumexp_N) if grad_logprobs_N is None else grad_logprobs_N / temperature_N,
            entropy_N,
            None if grad_entropy_N is None else grad_entropy_N / temperature_N,
        )
        grad_NH = torch.zeros_like(hidden_NH, dtype=torch.float32) if needs_hidden else None
        grad_VH = torch.empty_like(weight_VH) if needs_weight else None
        grad_V = torch.empty_like(bias_V) if needs_bias else None
        for start, stop in _spans(len(weight_VH), ctx.width):
            scaled_NV = _scaled_logits(hidden_NH, weight_VH, bias_V, start, stop, temperature_N)
            tile_NV = gradient.of_tile(scaled_NV, start)
            if grad_V is not None:
                grad_V[start:stop] = tile_NV.sum(dim=0)
            tile_NV = tile_NV.to(weight_VH.dtype)
            if grad_NH is not None:
                _add_product(grad_NH, tile_NV, weight_VH[start:stop])
            if grad_VH is not None:
                torch.mm(tile_NV.T, hidden_NH, out=grad_VH[start:stop])
        return None if grad_NH is None else grad_NH.to(hidden_NH.dtype), grad_VH, grad_V, None, None, None, None


def _scaled_logits(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, start: int, stop: int, temperature_N: Tensor
) -> Tensor:
    """A new fp32 tensor, as the temperature is: softmax is never computed in bf16. Divided in place: a tile less to write."""
    bias = None if bias_V is None else bias_V[start:stop]
    return functional.linear(hidden_NH, weight_VH[start:stop], bias).float().div_(temperature_N.unsqueeze(1))


def _add_product(sum_NH: Tensor, left_NV: Tensor, right_VH: Tensor) -> None:
    """Add ``left @ right``; in one step where the types allow it, which spares a copy of the sum."""
    if left_NV.dtype == sum_NH.dtype:
        sum_NH.addmm_(left_NV, right_VH)
    else:
        sum_NH += left_NV @ right_VH


def _tile_width(num_tokens: int, vocabulary: int, chunk: int, device: str) -> int:
    """Columns of a tile."""
    tokens = max(num_tokens, 1)
    efficient = max((CPU_TILE if device == "cpu" else GPU_TILE) // tokens, MIN_WIDTH)
    return max(min(efficient, chunk * vocabulary // tokens), 1)


def _spans(length: int, width: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, width):
        yield start, min(start + width, length)
