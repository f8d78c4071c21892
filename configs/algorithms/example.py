"""An estimator and a policy loss of one's own. Use them with

algo:
  advantage: {estimator: configs/algorithms/example.py:peers}
actor:
  policy_loss_type: configs/algorithms/example.py:sapo
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlhf_core.algorithms.estimators import Estimator
from rlhf_core.algorithms.losses import LossInput, LossOutput, loss_output, token_ratio

if TYPE_CHECKING:
    from torch import Tensor

TAU_POSITIVE, TAU_NEGATIVE = 1.0, 1.05  # the negative gate closes sooner


def against_peers(rewards_G: Tensor) -> Tensor:
    """Each reward as a z-score of the *other* samples of its group; peers without spread do not divide.

    ``[1, 0, 0, 0]`` gives ``[1, -.577, -.577, -.577]``: the peers of the first are all 0.
    """
    n = len(rewards_G)
    peers_GP = rewards_G.expand(n, n)[~torch.eye(n, dtype=torch.bool)].view(n, n - 1)
    same_G = peers_GP.amax(dim=1) == peers_GP.amin(dim=1)  # compared exactly: a std of equal numbers is rounding noise
    spread_G = peers_GP.std(dim=1) if n > 2 else torch.ones_like(rewards_G)
    return (rewards_G - peers_GP.mean(dim=1)) / torch.where(same_G, 1.0, spread_G)


peers = Estimator("peers", against_peers, needs_group=True)


def sapo(inputs: LossInput) -> LossOutput:
    """A soft gate on the ratio in place of PPO's clip: ``-4 / tau * sigmoid(tau * (rho - 1)) * A`` (arXiv:2511.20347)."""
    ratio_BT, advantages_BT = token_ratio(inputs), inputs.masked_advantages_BT
    tau_BT = torch.where(advantages_BT > 0, TAU_POSITIVE, TAU_NEGATIVE)
    gate_BT = 4 / tau_BT * torch.sigmoid(tau_BT * (ratio_BT - 1))
    return loss_output(inputs, -gate_BT * advantages_BT, ratio_BT, clipped_BT=torch.zeros_like(inputs.mask_BT))
