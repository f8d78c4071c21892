"""What an advantage estimator is: how it shapes one group, and what the pipeline does with the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rlhf_core.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Estimator:
    """One row of the table of estimators (ALGORITHMS section 2)."""

    name: str
    shape: Callable[[Tensor], Tensor]  # rewards_G of one group, float64 -> shaped [G]
    whiten: bool = False  # one mean and variance over all action tokens of the batch
    needs_group: bool = False  # compares the samples of one prompt
    keeps_step_rewards: bool = False  # step rewards stay at their own tokens
    needs_critic: bool = False  # GAE instead of plain returns
    free_gamma: bool = False  # a discount other than 1 is allowed

    def shape_group(self, rewards_G: Tensor) -> Tensor:
        """``[G]`` shaped rewards of one group.

        A comparison without anything to compare is exactly 0: a group of one sample, or of equal rewards, whose
        rounding noise would otherwise be divided by rounding noise.

        Raises:
            TrainingError: ``shape`` gave something else than one finite number a sample.
        """
        if self.needs_group and (len(rewards_G) < 2 or bool(rewards_G.max() == rewards_G.min())):
            return torch.zeros_like(rewards_G)
        shaped_G = self.shape(rewards_G)
        if not isinstance(shaped_G, torch.Tensor) or shaped_G.shape != rewards_G.shape or not shaped_G.isfinite().all():
            raise TrainingError(
                f"estimator {self.name!r} made {shaped_G} of the rewards {rewards_G.tolist()}: "
                "its shape must return a tensor with one finite number for each"
            )
        return shaped_G


def keep(rewards_G: Tensor) -> Tensor:
    """The rewards as they are."""
    return rewards_G


def centre(rewards_G: Tensor) -> Tensor:
    """``r - mean(group)``."""
    return rewards_G - rewards_G.mean()
