"""Softmax over a vocabulary that is seen one tile of columns at a time.

Forward, ``RunningSoftmax`` keeps per token: the largest logit m, ``sum exp(z - m)``, ``sum exp(z - m) (z - m)`` and the
chosen logit (Milakov and Gimelshein 2018, arXiv:1805.02867). Backward, ``SoftmaxGradient`` needs nothing but those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

NO_LOGIT = -1e30  # below any logit, yet finite: -inf times an empty sum would be NaN


@dataclass(slots=True, eq=False)
class RunningSoftmax:
    """Sums over the tiles seen so far, ``[N]``. fp64 over hundreds of tiles: there are only N of each."""

    targets_N: Tensor
    maximum_N: Tensor  # fp32
    total_N: Tensor  # fp64: sum of exp(z - maximum)
    moment_N: Tensor  # fp64: sum of exp(z - maximum) * (z - maximum)
    chosen_N: Tensor  # fp32: logit of the target

    @classmethod
    def of(cls, targets_N: Tensor) -> RunningSoftmax:
        """Before the first tile."""
        zero_N = torch.zeros(len(targets_N), dtype=torch.float32, device=targets_N.device)
        return cls(targets_N, torch.full_like(zero_N, NO_LOGIT), zero_N.double(), zero_N.double(), zero_N)

    def add(self, tile_NV: Tensor, start: int, want_entropy: bool) -> None:
        """See the scaled logits of columns ``start ..``; they are overwritten."""
        column_N1, inside_N = _column(self.targets_N, start, tile_NV.shape[1])
        self.chosen_N = torch.where(inside_N, tile_NV.gather(1, column_N1).squeeze(1), self.chosen_N)
        maximum_N = torch.maximum(self.maximum_N, tile_NV.amax(dim=1))
        shift_N = (self.maximum_N - maximum_N).double()
        tile_NV.sub_(maximum_N.unsqueeze(1))
        weights_NV = tile_NV.exp() if want_entropy else tile_NV.exp_()
        if want_entropy:
            moved_N = (self.moment_N + shift_N * self.total_N) * shift_N.exp()
            self.moment_N = moved_N + torch.linalg.vecdot(weights_NV, tile_NV)
        self.total_N = self.total_N * shift_N.exp() + weights_NV.sum(dim=1)
        self.maximum_N = maximum_N

    @property
    def logsumexp_N(self) -> Tensor:
        """Of the scaled logits, fp32."""
        return (self.maximum_N + self.total_N.log()).float()

    @property
    def logprobs_N(self) -> Tensor:
        """Of the targets, fp32."""
        return (self.chosen_N - self.maximum_N - self.total_N.log()).float()

    @property
    def entropy_N(self) -> Tensor:
        """``log sum exp(z) - mean z``, fp32."""
        return (self.total_N.log() - self.moment_N / self.total_N).float()


@dataclass(frozen=True, slots=True, eq=False)
class SoftmaxGradient:
    """What a tile's gradient depends on besides its logits, fp32 ``[N]``."""

    targets_N: Tensor
    logsumexp_N: Tensor
    grad_logprobs_N: Tensor
    entropy_N: Tensor
    grad_entropy_N: Tensor | None  # None if the entropy is not used

    def of_tile(self, tile_NV: Tensor, start: int) -> Tensor:
        """Gradient of the scaled logits of columns ``start ..``, which are overwritten.

        ``d logp_i / dz_j = [i = j] - p_j`` and ``d entropy / dz_j = -p_j (log p_j + entropy)``.
        """
        logp_NV = tile_NV.sub_(self.logsumexp_N.unsqueeze(1))
        if self.grad_entropy_N is None:
            gradient_NV = logp_NV.exp_().mul_(-self.grad_logprobs_N.unsqueeze(1))
        else:
            slope_N, offset_N = -self.grad_entropy_N, self.grad_entropy_N * self.entropy_N + self.grad_logprobs_N
            gradient_NV = logp_NV.exp()
            gradient_NV *= logp_NV.mul_(slope_N.unsqueeze(1)).sub_(offset_N.unsqueeze(1))
        column_N1, inside_N = _column(self.targets_N, start, tile_NV.shape[1])
        chosen_N = torch.where(inside_N, self.grad_logprobs_N, 0.0)
        return gradient_NV.scatter_add_(1, column_N1, chosen_N.unsqueeze(1))


def _column(targets_N: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Column of each target in the tile ``[N, 1]`` (any valid one for those outside), and ``[N]`` which lie inside."""
    local_N = targets_N - start
    return local_N.clamp(0, width - 1).unsqueeze(1), (local_N >= 0) & (local_N < width)
