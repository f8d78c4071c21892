"""RLOO: reward minus the mean of the *other* samples of the group (Ahmadian et al. 2024, arXiv:2402.14740)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.algorithms.estimators.base import Estimator

if TYPE_CHECKING:
    from torch import Tensor


def leave_one_out(rewards_G: Tensor) -> Tensor:
    """``r - (sum(group) - r) / (n - 1)``."""
    return rewards_G - (rewards_G.sum() - rewards_G) / (len(rewards_G) - 1)


RLOO = Estimator("rloo", leave_one_out, needs_group=True)
