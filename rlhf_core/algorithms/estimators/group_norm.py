"""GRPO: reward as a z-score of its group (Shao et al. 2024, arXiv:2402.03300)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.algorithms.estimators.base import Estimator

if TYPE_CHECKING:
    from torch import Tensor

STD_EPS = 1e-9  # float64: far below any real spread, far above the rounding noise of rewards near 1


def standardise(rewards_G: Tensor) -> Tensor:
    """``(r - mean) / (std + eps)`` with the unbiased standard deviation."""
    return (rewards_G - rewards_G.mean()) / (rewards_G.std(correction=1) + STD_EPS)


GROUP_NORM = Estimator("group_norm", standardise, needs_group=True)
