"""PPO with an asymmetric clip range and, where asked for, dual clip."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.algorithms.losses.base import MAX_LOG_RATIO, LossInput, LossOutput, clipped_surrogate, loss_output

if TYPE_CHECKING:
    from torch import Tensor


def token_ratio(inputs: LossInput) -> Tensor:
    """``[B, T]`` ``exp(clamp(logp - logp_old, ±20))``."""
    return inputs.log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def ppo_loss(inputs: LossInput) -> LossOutput:
    """``-min(rho A, clip(rho) A)`` with a ratio per token (Schulman et al. 2017, arXiv:1707.06347)."""
    ratio_BT = token_ratio(inputs)
    loss_BT, clipped_BT = clipped_surrogate(ratio_BT, inputs)
    return loss_output(inputs, loss_BT, ratio_BT, clipped_BT)
