"""Log-probs and entropies of chosen tokens without the full logits, backward too.

N × V floats are the largest tensor of a training step by far (4096 × 151936 in fp32: 2.3 GiB, and autograd keeps
several). Here about two blocks of ``chunk × V`` floats live at once, for the price of one more output-layer matmul. A
block is::

    all columns of a few tokens                      all tokens of a few columns
    output_layer is any function or module           output_layer is a weight [V, H]

    hidden [chunk, H] ─▶ logits [chunk, V]           hidden [N, H] ─▶ logits [N, chunk·V/N]

The second is the faster one to train: each block makes its own rows of the weight's gradient, while in the first every
block adds to all of it. The first is for what has no plain weight: adapters, a bias, parameters that a hook gathers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from rlhf_core.algorithms.softmax_tiles import RunningSoftmax, SoftmaxGradient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

CPU_TILE = 1 << 19  # floats that stay in a core's cache between two passes
GPU_TILE = 1 << 26  # floats that keep a GPU busy longer than a kernel launch takes


def chunked_logprobs(
    hidden_NH: Tensor,
    output_layer: Callable[[Tensor], Tensor] | Tensor,
    targets_N: Tensor,
    temperature: float | Tensor,
    chunk: int,
    want_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """fp32 ``(logprobs [N], entropy [N] or None)`` of ``softmax(logits / temperature)``: what was sampled from.

    Args:
        hidden_NH: last hidden states, any float type; row n predicts ``targets_N[n]``.
        output_layer: hidden ``[n, H]`` to logits ``[n, V]``, called once per block and once more in the backward
            pass; or the weight ``[V, H]`` of a layer without bias.
        targets_N: chosen tokens.
        temperature: one number, or ``[N]``.
        chunk: tokens' worth of logits at a time; 64 with a weight of 150 k rows took 130 MB besides gradients.
        want_entropy: None instead of entropies saves a pass.
    """
    temperature_N = torch.as_tensor(temperature, dtype=torch.float32, device=hidden_NH.device).expand(len(hidden_NH))
    if isinstance(output_layer, torch.Tensor):
        width = max(chunk * len(output_layer) // max(len(hidden_NH), 1), 1)
        logprobs_N, entropy_N = _ScoreHidden.apply(
            hidden_NH, output_layer, targets_N, temperature_N, width, want_entropy
        )
    else:
        pieces = zip(hidden_NH.split(chunk), targets_N.split(chunk), temperature_N.split(chunk), strict=True)
        outputs = [_score_chunk(output_layer, *piece, want_entropy) for piece in pieces]
        logprobs_N, entropy_N = (torch.cat(column) for column in zip(*outputs, strict=True))
    return logprobs_N, entropy_N if want_entropy else None


def _score_chunk(
    output_layer: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, temperature: Tensor, want_entropy: bool
) -> tuple[Tensor, Tensor]:
    def score(hidden: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropy = _ScoreLogits.apply(output_layer(hidden), targets, temperature, want_entropy)
        return logprobs, entropy

    if not torch.is_grad_enabled():
        return score(hidden)
    # Not reentrant: the output layer's gradient is then summed over the chunks before its hooks see it, once.
    logprobs, entropy = checkpoint(score, hidden, use_reentrant=False)
    return logprobs, entropy


class _ScoreLogits(torch.autograd.Function):  # type: ignore[misc]
    """Logits ``[N, V]`` to logprobs and entropies ``[N]``; keeps the logits, in their own type."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, targets_N: Tensor, temperature_N: Tensor, want_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        softmax = RunningSoftmax.of(targets_N)
        for start, stop in _spans(logits_NV.shape[1], _cached_width(logits_NV)):
            softmax.add(_scaled(logits_NV[:, start:stop], temperature_N), start, want_entropy)
        return _finish(ctx, softmax, (logits_NV,), temperature_N, want_entropy)

    @staticmethod
    def backward(ctx: Any, grad_logprobs_N: Tensor, grad_entropy_N: Tensor) -> tuple[Tensor | None, ...]:
        (logits_NV,), temperature_N, gradient = _resume(ctx, grad_logprobs_N, grad_entropy_N)
        grad_NV = torch.empty_like(logits_NV)
        for start, stop in _spans(logits_NV.shape[1], _cached_width(logits_NV)):
            tile_NV = gradient.of_tile(_scaled(logits_NV[:, start:stop], temperature_N), start)
            grad_NV[:, start:stop] = tile_NV.div_(temperature_N.unsqueeze(1))
        return grad_NV, None, None, None


class _ScoreHidden(torch.autograd.Function):  # type: ignore[misc]
    """Hidden ``[N, H]`` and weight ``[V, H]`` to logprobs and entropies ``[N]``; keeps no logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        targets_N: Tensor,
        temperature_N: Tensor,
        width: int,
        want_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        softmax = RunningSoftmax.of(targets_N)
        for start, stop in _spans(len(weight_VH), width):
            softmax.add(_scaled(hidden_NH @ weight_VH[start:stop].T, temperature_N), start, want_entropy)
        ctx.width = width
        return _finish(ctx, softmax, (hidden_NH, weight_VH), temperature_N, want_entropy)

    @staticmethod
    def backward(ctx: Any, grad_logprobs_N: Tensor, grad_entropy_N: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_NH, weight_VH), temperature_N, gradient = _resume(ctx, grad_logprobs_N, grad_entropy_N)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_NH = torch.zeros_like(hidden_NH, dtype=torch.float32) if needs_hidden else None
        grad_VH = torch.empty_like(weight_VH) if needs_weight else None
        for start, stop in _spans(len(weight_VH), ctx.width):
            rows_VH = weight_VH[start:stop]
            tile_NV = gradient.of_tile(_scaled(hidden_NH @ rows_VH.T, temperature_N), start)
            tile_NV = tile_NV.div_(temperature_N.unsqueeze(1)).to(weight_VH.dtype)
            if grad_NH is not None:
                grad_NH += tile_NV @ rows_VH
            if grad_VH is not None:
                torch.mm(tile_NV.T, hidden_NH, out=grad_VH[start:stop])
        return None if grad_NH is None else grad_NH.to(hidden_NH.dtype), grad_VH, None, None, None, None


def _finish(
    ctx: Any, softmax: RunningSoftmax, inputs: tuple[Tensor, ...], temperature_N: Tensor, want_entropy: bool
) -> tuple[Tensor, Tensor]:
    """The outputs of a forward pass, and on ``ctx`` what ``_resume`` needs."""
    entropy_N = softmax.entropy_N if want_entropy else torch.zeros_like(softmax.total_N)
    if not want_entropy:
        ctx.mark_non_differentiable(entropy_N)
    ctx.want_entropy = want_entropy
    ctx.save_for_backward(*inputs, temperature_N, softmax.targets_N, softmax.logsumexp_N, entropy_N)
    return softmax.logprobs_N, entropy_N


def _resume(
    ctx: Any, grad_logprobs_N: Tensor, grad_entropy_N: Tensor
) -> tuple[tuple[Tensor, ...], Tensor, SoftmaxGradient]:
    *inputs, temperature_N, targets_N, logsumexp_N, entropy_N = ctx.saved_tensors
    used_entropy_N = grad_entropy_N if ctx.want_entropy else None
    gradient = SoftmaxGradient(targets_N, logsumexp_N, grad_logprobs_N, entropy_N, used_entropy_N)
    return tuple(inputs), temperature_N, gradient


def _scaled(logits_NV: Tensor, temperature_N: Tensor) -> Tensor:
    """A new fp32 tensor, as the temperature is: softmax is never computed in bf16."""
    return logits_NV / temperature_N.unsqueeze(1)


def _cached_width(logits_NV: Tensor) -> int:
    tile = CPU_TILE if logits_NV.device.type == "cpu" else GPU_TILE
    return max(tile // max(len(logits_NV), 1), 1)


def _spans(length: int, width: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, width):
        yield start, min(start + width, length)
