"""What an update did, in numbers: the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf_core.training.step import StepsTally


COUNTS = (
    "lr",
    "num_tokens",
    "applied_steps",
    "skipped_steps",
    "seconds",
)  # of an update, whether it changed anything or not


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """One update: all its optimizer steps, over all ranks. Means are over the action tokens of the applied steps."""

    policy_loss: float  # mean over the applied steps
    aux_loss: float | None  # balancing loss, unscaled, mean over rows and the applied steps; None if it was not wanted
    kl: float | None  # mean KL from the reference, unscaled; None without a reference model
    entropy: float  # nats
    clip_fraction: float  # share of tokens whose gradient the clip took away
    approx_kl: float  # mean of -(logp - logp_old): how far this update went
    ratio_mean: float
    ratio_max: float
    mismatch: float  # mean |logp_old - logp_rollout| of the tokens that can be compared
    mismatch_kl: float  # estimate of KL(engine | trainer)
    capped_fraction: float  # of the compared tokens: correction clamped
    dropped_fraction: float  # of the compared tokens: correction set to 0
    grad_norm: float  # before clipping, mean over the applied steps
    lr: float  # of the last step
    num_tokens: int  # action tokens trained, counted once an epoch
    applied_steps: int
    skipped_steps: int  # not finite: weights left as they were
    seconds: float

    def metrics(self) -> dict[str, float]:
        """By name, without what was not measured: without an applied step that is all but the counts."""
        names = [item.name for item in fields(self)] if self.applied_steps else COUNTS
        values = {name: getattr(self, name) for name in names}
        return {name: float(value) for name, value in values.items() if value is not None}


def update_report(tally: StepsTally, *, lr: float, seconds: float, has_reference: bool) -> UpdateReport:
    """One update in numbers; without an applied step, means are 0.

    Args:
        tally: of its steps, with the names ``SUMS``; its peak is the largest probability ratio.
        lr: of the last step.
        seconds: of the whole update.
        has_reference: a KL from it was measured.
    """
    sums = tally.sums
    tokens, compared = max(sums["tokens"], 1.0), max(sums["compared"], 1.0)
    steps = max(tally.applied, 1)
    return UpdateReport(
        policy_loss=sums["policy_loss"] / steps,
        aux_loss=sums["aux_loss"] / steps or None,  # a balancing loss is never 0: the expert chosen has a probability
        kl=sums["kl"] / tokens if has_reference and tally.applied else None,  # not measured is not 0
        entropy=sums["entropy"] / tokens,
        clip_fraction=sums["clipped"] / tokens,
        approx_kl=sums["approx_kl"] / tokens,
        ratio_mean=sums["ratio"] / tokens,
        ratio_max=tally.peak,
        mismatch=sums["mismatch"] / compared,
        mismatch_kl=sums["mismatch_kl"] / compared,
        capped_fraction=sums["capped"] / compared,
        dropped_fraction=sums["dropped"] / compared,
        grad_norm=tally.grad_norm,
        lr=lr,
        num_tokens=int(sums["tokens"]),
        applied_steps=tally.applied,
        skipped_steps=tally.skipped,
        seconds=seconds,
    )
