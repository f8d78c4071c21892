"""Changes to a sample's scalar reward before any estimator sees it, in one fixed order.

::

    raw ─▶ clip ─▶ + overlong penalty (DAPO) ─▶ stop-properly penalty (multiply or replace) ─▶ shaped

One entry per *episode*: the segments of one episode share its reward, and their action tokens count together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ShapingSettings:
    """Which changes apply; None switches one off."""

    max_new_tokens: int
    clip_range: tuple[float, float] | None = None
    overlong_buffer: int | None = None
    overlong_factor: float = 1.0
    stop_properly_coef: float | None = None


@dataclass(frozen=True, slots=True)
class ShapingEffect:
    """What one change did to the batch."""

    mean_change: float  # over all N samples
    count: int  # samples it changed


@dataclass(frozen=True, slots=True, eq=False)
class ShapedRewards:
    """Rewards after all changes."""

    rewards_N: Tensor  # float64
    effects: dict[str, ShapingEffect]  # "clip", "overlong", "stop_properly": only those that are switched on


def shape_rewards(
    rewards_N: Tensor, num_actions_N: Tensor, truncated_N: Tensor, settings: ShapingSettings
) -> ShapedRewards:
    """Apply what is switched on, in the fixed order, and say what each change did.

    Args:
        rewards_N: raw rewards.
        num_actions_N: action tokens of each sample; tool and pad tokens do not count.
        truncated_N: bool, True where the policy was cut off by a limit.
        settings: what is switched on.
    """
    rewards_N = rewards_N.double()
    effects: dict[str, ShapingEffect] = {}

    def note(name: str, after_N: Tensor) -> Tensor:
        effects[name] = _effect(rewards_N, after_N)
        return after_N

    if settings.clip_range is not None:
        rewards_N = note("clip", clip_rewards(rewards_N, settings.clip_range))
    if settings.overlong_buffer is not None:
        penalty_N = overlong_penalty(
            num_actions_N, settings.max_new_tokens, settings.overlong_buffer, settings.overlong_factor
        )
        rewards_N = note("overlong", rewards_N + penalty_N)
    if settings.stop_properly_coef is not None:
        rewards_N = note("stop_properly", stop_properly(rewards_N, truncated_N, settings.stop_properly_coef))
    return ShapedRewards(rewards_N, effects)


def clip_rewards(rewards_N: Tensor, clip_range: tuple[float, float]) -> Tensor:
    """``[N]`` rewards inside ``(low, high)``."""
    return rewards_N.clamp(*clip_range)


def overlong_penalty(num_actions_N: Tensor, max_new_tokens: int, buffer: int, factor: float) -> Tensor:
    """``[N]`` what to add: 0 up to ``max_new_tokens - buffer``, then falling linearly to ``-factor`` (DAPO, eq. 13)."""
    excess_N = (num_actions_N.double() - (max_new_tokens - buffer)).clamp(0, buffer)
    return -excess_N / buffer * factor


def stop_properly(rewards_N: Tensor, truncated_N: Tensor, coef: float) -> Tensor:
    """``[N]`` rewards, where truncated ones are replaced by ``coef`` if it is negative, else scaled by it if positive.

    A negative reward is never scaled: a coefficient below 1 would improve it.
    """
    if coef < 0:
        return torch.where(truncated_N, torch.full_like(rewards_N, coef), rewards_N)
    return torch.where(truncated_N & (rewards_N > 0), rewards_N * coef, rewards_N)


def _effect(before_N: Tensor, after_N: Tensor) -> ShapingEffect:
    change_N = after_N - before_N
    return ShapingEffect(
        mean_change=float(change_N.mean()) if change_N.numel() else 0.0, count=int((change_N != 0).sum())
    )
