"""Distance from the reference model: per-token estimates, and the controllers of its coefficient.

``d = logp - logp_ref`` at a sampled token; k1, k2, k3 as in Schulman, "Approximating KL divergence" (2020).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from rlhf_core.algorithms.registry import look_up
from rlhf_core.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

MAX_KL = 10.0  # one token that the reference finds impossible must not drown the batch
MAX_LOG_RATIO = 20.0  # far beyond MAX_KL; keeps exp() finite, so that its gradient is 0 there and not 0·inf
MAX_ERROR = 0.2  # of the adaptive controller: one odd batch moves the coefficient little


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy | reference), clamped to ±10; any shape, differentiable in ``logprobs``.

    Raises:
        ConfigError: no such estimate.
    """
    difference = (logprobs.float() - ref_logprobs.float()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return look_up(KL_ESTIMATES, "KL estimate", kind)(difference).clamp(-MAX_KL, MAX_KL)


def k1(difference: Tensor) -> Tensor:
    """``d``: unbiased, may be negative."""
    return difference


def k2(difference: Tensor) -> Tensor:
    """``d² / 2``: biased, low variance."""
    return difference.square() / 2


def k3(difference: Tensor) -> Tensor:
    """``exp(-d) - 1 + d``: unbiased, never negative."""
    return (-difference).exp() - 1 + difference


KL_ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


class KlController(Protocol):
    """Decides the KL coefficient, which is all its state: the log of the run keeps it, and a resume starts from there."""

    @property
    def coef(self) -> float:
        """The coefficient ``b`` to use now."""
        ...

    def updated(self, current_kl: float, n_steps: int) -> KlController:
        """The controller after a batch of ``n_steps`` samples whose true mean KL was ``current_kl``."""
        ...


@dataclass(frozen=True, slots=True)
class FixedKl:
    """A constant coefficient."""

    coef: float

    def updated(self, current_kl: float, n_steps: int) -> FixedKl:
        """Unchanged."""
        return self


@dataclass(frozen=True, slots=True)
class AdaptiveKl:
    """``b *= 1 + clip(current / target - 1, ±0.2) * n_steps / horizon`` (Ziegler et al. 2019, arXiv:1909.08593)."""

    coef: float
    target: float
    horizon: float  # samples

    def updated(self, current_kl: float, n_steps: int) -> AdaptiveKl:
        """The controller after a batch.

        Raises:
            TrainingError: the KL is not finite; it would be kept in every later coefficient.
        """
        if not math.isfinite(current_kl):
            raise TrainingError(
                f"mean KL {current_kl} is not finite: skip this batch, the KL coefficient keeps its value"
            )
        error = min(max(current_kl / self.target - 1, -MAX_ERROR), MAX_ERROR)
        return replace(self, coef=self.coef * (1 + error * n_steps / self.horizon))


def make_kl_controller(coef: float, target: float | None, horizon: float) -> KlController:
    """Adaptive where there is a target, else fixed; ``coef`` is that of the configuration, or of the batch before."""
    return FixedKl(coef) if target is None else AdaptiveKl(coef, target, horizon)
