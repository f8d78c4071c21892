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

CHUNK = 256  # tokens of the scan that are in time-major form at a time: they fit in the processor's cache


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
    num_rows, width = mask_BT.shape
    if not width:
        return torch.zeros(num_rows, dtype=torch.int64, device=mask_BT.device)
    last_B = width - 1 - mask_BT.flip(1).byte().argmax(dim=1)  # argmax names the first of equals
    return torch.where(mask_BT.any(dim=1), last_B, 0)


def discounted_returns(rewards_BT: Tensor, mask_BT: Tensor, gamma: float) -> Tensor:
    """``[B, T]`` float64: ``G_t = R_t + gamma * G_next`` over action tokens, 0 elsewhere."""
    return _scan(rewards_BT, None, mask_BT, gamma, 1.0, None)


def generalised_advantages(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    gamma: float,
    lambd: float,
    bootstrap_B: Tensor | None = None,
) -> Tensor:
    """``[B, T]`` float64: GAE over action tokens, 0 elsewhere (arXiv:1506.02438); the returns are ``A + V``.

    ``delta_t = R_t + gamma * V_next - V_t`` and ``A_t = delta_t + gamma * lambd * A_next``; "next" is the next action
    token. The value after the last one is ``bootstrap_B``, 0 by default.
    """
    return _scan(rewards_BT, values_BT, mask_BT, gamma, lambd, bootstrap_B)


def _scan(
    rewards_BT: Tensor,
    values_BT: Tensor | None,  # None: 0 everywhere
    mask_BT: Tensor,
    gamma: float,
    lambd: float,
    bootstrap_B: Tensor | None,
) -> Tensor:
    """GAE as one multiply-add per token, by way of the lambda-return ``G = A + V`` (Sutton and Barto 2018, 12.1).

    ``G_t = R_t + gamma * W``, where ``W = (1 - lambd) * V_next + lambd * G_next`` is the worth of all that follows token
    t. The worth before an action token is made from the one after it; a token that is stepped over hands it on::

        action token    W_before = (1 - lambd) * V_t + lambd * R_t  +  gamma * lambd * W
        other token     W_before =                                                     W
    """
    num_rows, width = mask_BT.shape
    mask_TB = mask_BT.T.contiguous()
    advantages_BT = torch.empty(mask_BT.shape, dtype=torch.float64, device=mask_BT.device)
    carry_B = advantages_BT.new_zeros(num_rows) if bootstrap_B is None else bootstrap_B.to(advantages_BT)
    for start in reversed(range(0, width, CHUNK)):
        chunk = slice(start, start + CHUNK)
        other_TB = ~mask_TB[chunk]
        gain_TB = _time_major(rewards_BT[:, chunk])  # R_t - V_t
        worth = advantages_BT.new_empty(len(gain_TB) + 1, num_rows)  # after the last token too
        before_TB, after_TB = worth[:-1], worth[1:]
        if values_BT is None:
            before_TB.copy_(gain_TB)
        else:
            values_TB = _time_major(values_BT[:, chunk])
            torch.lerp(values_TB, gain_TB, lambd, out=before_TB)
            gain_TB -= values_TB
        before_TB.masked_fill_(other_TB, 0.0)
        decay_TB = torch.ones_like(gain_TB).masked_fill_(mask_TB[chunk], gamma * lambd)
        worth[-1] = carry_B
        for before_B, decay_B in zip(reversed(before_TB.unbind()), reversed(decay_TB.unbind()), strict=True):
            carry_B = before_B.addcmul_(decay_B, carry_B)
        advantages_BT[:, chunk] = gain_TB.add_(after_TB, alpha=gamma).masked_fill_(other_TB, 0.0).T
    return advantages_BT


def _time_major(values_BT: Tensor) -> Tensor:
    """A ``[T, B]`` float64 copy: a step of the scan then reads one run of memory."""
    rows_BT = values_BT.double().contiguous()  # torch transposes what is contiguous several times as fast
    return rows_BT.T.clone(memory_format=torch.contiguous_format)
