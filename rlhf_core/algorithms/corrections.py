"""Factors on the token losses where the engine that sampled and the trainer that learns disagree on a log-prob.

``w_t = exp(logp_old - logp_rollout)``, kept in ``[low, high]``; what "kept" means is the type::

    tis            clamp(w, low, high)
    icepop         w if low <= w <= high else 0
    seq-mask-tis   clamp(w, low, high) if low <= geometric mean of the row's w <= high else 0

A dropped token stays in the denominator of the aggregation. Factors carry no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rlhf_core.algorithms.aggregation import masked_mean
from rlhf_core.algorithms.registry import look_up

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

MAX_LOG_RATIO = 20.0  # keeps exp() finite: inf times a zero loss would be NaN


@dataclass(frozen=True, slots=True, eq=False)
class CorrectionInput:
    """One micro-batch."""

    old_logprobs_BT: Tensor  # the trainer's
    rollout_logprobs_BT: Tensor  # the engine's, of the same tokens
    mask_BT: Tensor  # bool, True where the policy spoke
    low: float
    high: float
    constrained_B: Tensor | None = None  # bool: the engine renormalised its log-probs; such a row gets factor 1

    @property
    def compared_BT(self) -> Tensor:
        """Bool: action tokens whose two log-probs can be compared."""
        return self.mask_BT if self.constrained_B is None else self.mask_BT & ~self.constrained_B.unsqueeze(1)

    @property
    def log_weight_BT(self) -> Tensor:
        """``log w``, clamped to ±20, 0 where nothing is compared."""
        difference_BT = (self.old_logprobs_BT.float() - self.rollout_logprobs_BT.float()).detach()
        return torch.where(self.compared_BT, difference_BT, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True, slots=True, eq=False)
class CorrectionOutput:
    """Factors, and sums over the compared tokens: they add up over micro-batches and ranks, divide once at the end."""

    factor_BT: Tensor  # detached; 1 where nothing is compared
    num_tokens: Tensor  # scalar, as all below: tokens compared
    mismatch_sum: Tensor  # of |log w|
    kl_sum: Tensor  # of -log w: estimates KL(engine | trainer)
    capped_sum: Tensor  # tokens whose weight was clamped
    dropped_sum: Tensor  # tokens whose weight became 0


def correct(inputs: CorrectionInput, kind: str) -> CorrectionOutput:
    """Factors of the named correction (``algo.advantage.is_correction_type``); an unknown one is a ``ConfigError``."""
    log_weight_BT, compared_BT = inputs.log_weight_BT, inputs.compared_BT
    clamped_BT, kept_BT = look_up(CORRECTIONS, "correction", kind)(log_weight_BT, inputs)
    capped_BT = kept_BT & (clamped_BT != log_weight_BT.exp())
    factor_BT = torch.where(kept_BT, clamped_BT, 0.0)
    return CorrectionOutput(
        factor_BT=torch.where(compared_BT, factor_BT, 1.0),
        num_tokens=compared_BT.sum(),
        mismatch_sum=log_weight_BT.abs().sum(),
        kl_sum=-log_weight_BT.sum(),
        capped_sum=(capped_BT & compared_BT).sum(),
        dropped_sum=(~kept_BT & compared_BT).sum(),
    )


def tis(log_weight_BT: Tensor, inputs: CorrectionInput) -> tuple[Tensor, Tensor]:
    """Truncated importance sampling: clamp every weight."""
    return _clamped(log_weight_BT, inputs), torch.ones_like(inputs.mask_BT)


def icepop(log_weight_BT: Tensor, inputs: CorrectionInput) -> tuple[Tensor, Tensor]:
    """Drop tokens outside the range, leave the others."""
    weight_BT = log_weight_BT.exp()
    return weight_BT, (weight_BT >= inputs.low) & (weight_BT <= inputs.high)


def seq_mask_tis(log_weight_BT: Tensor, inputs: CorrectionInput) -> tuple[Tensor, Tensor]:
    """Drop rows whose geometric mean weight is outside the range, clamp the weights of the others."""
    mean_B = masked_mean(log_weight_BT, inputs.mask_BT).exp()
    kept_B = (mean_B >= inputs.low) & (mean_B <= inputs.high)
    return _clamped(log_weight_BT, inputs), kept_B.unsqueeze(1).expand_as(inputs.mask_BT)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How far the trainer's log-probs are from the engine's, over all action tokens, of which there is one at least."""

    num_tokens: int
    abs_sum: float  # of |log w|
    weight_sum: float  # of w
    weight_squared_sum: float  # of w²
    abs_max: float

    @classmethod
    def of(cls, log_weights_N: Tensor) -> Mismatch:
        """Of tokens by their ``log w``."""
        abs_sum, weight_sum, squared_sum = weight_sums(log_weights_N).tolist()
        return cls(len(log_weights_N), abs_sum, weight_sum, squared_sum, float(log_weights_N.abs().max()))

    @property
    def effective_share(self) -> float:
        """Effective sample size of the weights over their number: ``(Σ w)² / (N Σ w²)``, 1 where all are equal."""
        return self.weight_sum**2 / (self.num_tokens * self.weight_squared_sum)

    def metrics(self) -> dict[str, float]:
        """By name."""
        return {
            "mismatch/logprob_abs_mean": self.abs_sum / self.num_tokens,
            "mismatch/logprob_abs_max": self.abs_max,
            "mismatch/effective_share": self.effective_share,
        }


def weight_sums(log_weights_N: Tensor) -> Tensor:
    """``[3]`` float64: sums of ``|log w|``, ``w`` and ``w²``; they add up over micro-batches and ranks."""
    log_weights_N = log_weights_N.detach().double()
    weights_N = log_weights_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return torch.stack([log_weights_N.abs().sum(), weights_N.sum(), weights_N.square().sum()])


def _clamped(log_weight_BT: Tensor, inputs: CorrectionInput) -> Tensor:
    return log_weight_BT.exp().clamp(inputs.low, inputs.high)


# (log w [B, T], input) -> (weights [B, T], which of them are kept [B, T] bool)
CORRECTIONS: dict[str, Callable[[Tensor, CorrectionInput], tuple[Tensor, Tensor]]] = {
    "tis": tis,
    "icepop": icepop,
    "seq-mask-tis": seq_mask_tis,
}
