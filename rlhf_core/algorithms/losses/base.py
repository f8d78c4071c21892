"""A policy loss is a pure function from ``LossInput`` to ``LossOutput``; a row is one sequence (unpack packed rows)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0  # keeps exp() finite where a token became all but impossible


@dataclass(frozen=True, slots=True, eq=False)
class LossInput:
    """One micro-batch. What stands outside the mask does not count, NaN included."""

    logprobs_BT: Tensor  # of the policy that is trained, with a graph
    old_logprobs_BT: Tensor  # before the first update of the batch
    advantages_BT: Tensor
    mask_BT: Tensor  # bool, True where the policy spoke
    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: float | None = None  # c > 1

    @property
    def log_ratio_BT(self) -> Tensor:
        """``logp - logp_old``, unclamped, 0 outside the mask."""
        return torch.where(self.mask_BT, self.logprobs_BT.float() - self.old_logprobs_BT.float(), 0.0)

    @property
    def masked_advantages_BT(self) -> Tensor:
        """0 outside the mask."""
        return torch.where(self.mask_BT, self.advantages_BT.float(), 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class LossOutput:
    """Token losses, and sums over action tokens: they add up over micro-batches and ranks, divide once at the end."""

    loss_BT: Tensor  # 0 outside the mask
    num_tokens: Tensor  # scalar, detached, as all below
    clipped_sum: Tensor  # tokens whose gradient the clip took away
    kl_sum: Tensor  # of -(logp - logp_old): how far this update has gone
    ratio_sum: Tensor  # of the probability ratio


class PolicyLoss(Protocol):
    """What stands in the registry."""

    def __call__(self, inputs: LossInput, /) -> LossOutput:
        """The token losses of one micro-batch."""
        ...


def clipped_surrogate(ratio_BT: Tensor, inputs: LossInput) -> tuple[Tensor, Tensor]:
    """PPO's token loss and where its clip was active, both ``[B, T]`` (arXiv:1707.06347; dual clip arXiv:1912.09729).

    ``-min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A)``; with dual clip, ``-max(min(...), c A)`` where A < 0.
    """
    advantages_BT = inputs.masked_advantages_BT
    free_BT = ratio_BT * advantages_BT
    clipped_BT = ratio_BT.clamp(1 - inputs.eps_low, 1 + inputs.eps_high) * advantages_BT
    objective_BT = torch.minimum(free_BT, clipped_BT)
    if inputs.dual_clip is not None:
        bounded_BT = torch.maximum(objective_BT, inputs.dual_clip * advantages_BT)
        objective_BT = torch.where(advantages_BT < 0, bounded_BT, objective_BT)
    return -objective_BT, clipped_BT < free_BT


def loss_output(inputs: LossInput, loss_BT: Tensor, ratio_BT: Tensor, clipped_BT: Tensor) -> LossOutput:
    """The token losses with their sums."""
    mask_BT = inputs.mask_BT
    return LossOutput(
        loss_BT=torch.where(mask_BT, loss_BT, 0.0),
        num_tokens=mask_BT.sum(),
        clipped_sum=(clipped_BT & mask_BT).sum(),
        kl_sum=-inputs.log_ratio_BT.detach().sum(),
        ratio_sum=torch.where(mask_BT, ratio_BT.detach(), 0.0).sum(),
    )
