"""CISPO: a capped importance weight on the plain policy gradient, so that no token loses its gradient."""

from __future__ import annotations

import torch

from rlhf_core.algorithms.losses.base import LossInput, LossOutput, loss_output
from rlhf_core.algorithms.losses.ppo import token_ratio


def cispo_loss(inputs: LossInput) -> LossOutput:
    """``-stopgrad(min(rho, 1 + eps_high)) A logp`` (MiniMax-M1 2025, arXiv:2506.13585)."""
    ratio_BT = token_ratio(inputs).detach()
    cap = 1 + inputs.eps_high
    logprobs_BT = torch.where(inputs.mask_BT, inputs.logprobs_BT.float(), 0.0)
    loss_BT = -ratio_BT.clamp(max=cap) * inputs.masked_advantages_BT * logprobs_BT
    return loss_output(inputs, loss_BT, ratio_BT, ratio_BT > cap)
