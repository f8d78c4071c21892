"""GSPO: PPO's clip on one ratio per sequence. To be aggregated by sample means."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.algorithms.aggregation import masked_mean
from rlhf_core.algorithms.losses.base import MAX_LOG_RATIO, LossInput, LossOutput, clipped_surrogate, loss_output

if TYPE_CHECKING:
    from torch import Tensor


def sequence_ratio(inputs: LossInput) -> Tensor:
    """``[B]`` ``exp`` of the mean log-ratio over the row's action tokens: a geometric mean."""
    return masked_mean(inputs.log_ratio_BT, inputs.mask_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def gspo_loss(inputs: LossInput) -> LossOutput:
    """``-min(rho A, clip(rho) A)`` with a ratio per sequence (Zheng et al. 2025, arXiv:2507.18071)."""
    ratio_BT = sequence_ratio(inputs).unsqueeze(1).expand_as(inputs.logprobs_BT)
    loss_BT, clipped_BT = clipped_surrogate(ratio_BT, inputs)
    return loss_output(inputs, loss_BT, ratio_BT, clipped_BT)
