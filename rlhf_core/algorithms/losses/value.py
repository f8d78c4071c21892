"""The critic's loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ValueLossInput:
    """One micro-batch. What stands outside the mask does not count, NaN included."""

    values_BT: Tensor  # of the critic that is trained, with a graph
    old_values_BT: Tensor  # before the first update of the batch
    returns_BT: Tensor
    mask_BT: Tensor  # bool, True where the policy spoke
    clip: float


@dataclass(frozen=True, slots=True, eq=False)
class ValueLossOutput:
    """Token losses (the factor 0.5 is in them), and sums over action tokens."""

    loss_BT: Tensor  # 0 outside the mask
    num_tokens: Tensor  # scalar, detached, as below
    clipped_sum: Tensor  # tokens where the clipped error is the larger one


def value_loss(inputs: ValueLossInput) -> ValueLossOutput:
    """``0.5 max((V - R)², (V_old + clip(V - V_old, ±c) - R)²)`` per token (PPO's reference implementation)."""
    mask_BT = inputs.mask_BT
    values_BT, old_BT, returns_BT = (
        torch.where(mask_BT, x.float(), 0.0) for x in (inputs.values_BT, inputs.old_values_BT, inputs.returns_BT)
    )
    near_BT = old_BT + (values_BT - old_BT).clamp(-inputs.clip, inputs.clip)
    free_BT, clipped_BT = (values_BT - returns_BT).square(), (near_BT - returns_BT).square()
    return ValueLossOutput(
        loss_BT=0.5 * torch.maximum(free_BT, clipped_BT),
        num_tokens=mask_BT.sum(),
        clipped_sum=((clipped_BT > free_BT) & mask_BT).sum(),
    )
