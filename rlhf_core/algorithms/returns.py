"""From a scalar per row to a number per token: placing rewards, then returns or GAE, over action tokens only.

Environment and pad tokens are stepped over, not counted as time::

    mask      1 1 0 0 0 1        gamma .9, reward 1 on the last action token
    return   .81 .9 0 0 0 1      the tool output in between costs no discount
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlhf_core.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def place_rewards(
    rewards_B: Tensor, mask_BT: Tensor, step_rewards: Sequence[Sequence[tuple[int, float]]] | None = None
) -> Tensor:
    """``[B, T]`` float64: every row sums to its reward.

    Step rewards ``(position, reward)`` stay at their positions; what is left of the row's reward (all of it without
    step rewards; what clipping, penalties or other segments of the episode changed) falls on its last action token.
    A row without action tokens stays 0.

    Raises:
        TrainingError: a step reward lies on a token that the policy did not speak.
    """
    placed_BT = torch.zeros(mask_BT.shape, dtype=torch.float64, device=mask_BT.device)
    rest_B = rewards_B.to(placed_BT, copy=True)
    for row, steps in enumerate(step_rewards or ()):
        for position, reward in steps:
            if not 0 <= position < mask_BT.shape[1] or not mask_BT[row, position]:
                raise TrainingError(
                    f"step reward {reward} of row {row} lies at token {position}, which is not an action token: "
                    "give it the index of the last token of its own turn"
                )
            placed_BT[row, position] += reward
            rest_B[row] -= reward
    rows = mask_BT.any(dim=1).nonzero().squeeze(1)
    placed_BT[rows, last_action(mask_BT)[rows]] += rest_B[rows]
    return placed_BT


def last_action(mask_BT: Tensor) -> Tensor:
    """``[B]`` index of the last action token; 0 for a row without any."""
    steps_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    return (mask_BT * steps_T).amax(dim=1) if mask_BT.shape[1] else torch.zeros_like(mask_BT.sum(dim=1))


def discounted_returns(rewards_BT: Tensor, mask_BT: Tensor, gamma: float) -> Tensor:
    """``[B, T]``: ``G_t = R_t + gamma * G_next`` over action tokens, 0 elsewhere."""
    rewards_TB, mask_TB = _time_major(rewards_BT, mask_BT)
    returns_TB = torch.zeros_like(rewards_TB)
    following_B = torch.zeros(len(mask_BT), dtype=torch.float64, device=mask_BT.device)
    for t in range(len(rewards_TB) - 1, -1, -1):
        following_B = torch.where(mask_TB[t], rewards_TB[t] + gamma * following_B, following_B)
        returns_TB[t] = following_B
    return torch.where(mask_BT, returns_TB.T, 0.0)


def generalised_advantages(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    gamma: float,
    lambd: float,
    bootstrap_B: Tensor | None = None,
) -> Tensor:
    """``[B, T]`` GAE over action tokens, 0 elsewhere (arXiv:1506.02438); the returns are ``A + V``.

    ``delta_t = R_t + gamma * V_next - V_t`` and ``A_t = delta_t + gamma * lambd * A_next``; "next" is the next action
    token. The value after the last one is ``bootstrap_B``, 0 by default.
    """
    rewards_TB, mask_TB = _time_major(rewards_BT, mask_BT)
    values_TB, _ = _time_major(values_BT, mask_BT)
    advantages_TB = torch.zeros_like(rewards_TB)
    following_B = torch.zeros(len(mask_BT), dtype=torch.float64, device=mask_BT.device)
    next_value_B = following_B if bootstrap_B is None else bootstrap_B.to(following_B)
    for t in range(len(rewards_TB) - 1, -1, -1):
        delta_B = rewards_TB[t] + gamma * next_value_B - values_TB[t]
        following_B = torch.where(mask_TB[t], delta_B + gamma * lambd * following_B, following_B)
        next_value_B = torch.where(mask_TB[t], values_TB[t], next_value_B)
        advantages_TB[t] = following_B
    return torch.where(mask_BT, advantages_TB.T, 0.0)


def _time_major(values_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous ``[T, B]`` copies: a step of the scan then reads one run of memory."""
    return torch.where(mask_BT, values_BT.double(), 0.0).T.contiguous(), mask_BT.T.contiguous()
