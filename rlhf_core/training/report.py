"""What an update did, in numbers: the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from rlhf_core.training.objective import SUMS

if TYPE_CHECKING:
    from rlhf_core.training.step import StepTally


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


class UpdateTally:
    """What the steps of one update add up to."""

    def __init__(self) -> None:
        self.sums = dict.fromkeys(SUMS, 0.0)
        self.ratio_max = 0.0
        self.grad_norms: list[float] = []
        self.skipped_steps = 0

    def applied(self, step: StepTally, grad_norm: float) -> None:
        """Count a step that changed the weights; its tally is reduced."""
        for name, value in step.sums.items():
            self.sums[name] += value
        self.ratio_max = max(self.ratio_max, step.peak)
        self.grad_norms.append(grad_norm)

    def skipped(self) -> None:
        """Count a step that did not."""
        self.skipped_steps += 1

    def report(self, *, lr: float, seconds: float, has_reference: bool) -> UpdateReport:
        """The update in numbers; without an applied step, means are 0."""
        sums = self.sums
        tokens, compared = max(sums["tokens"], 1.0), max(sums["compared"], 1.0)
        steps = max(len(self.grad_norms), 1)
        return UpdateReport(
            policy_loss=sums["policy_loss"] / steps,
            aux_loss=sums["aux_loss"] / steps
            or None,  # a balancing loss is never 0: the expert chosen has a probability
            kl=sums["kl"] / tokens if has_reference and self.grad_norms else None,  # not measured is not 0
            entropy=sums["entropy"] / tokens,
            clip_fraction=sums["clipped"] / tokens,
            approx_kl=sums["approx_kl"] / tokens,
            ratio_mean=sums["ratio"] / tokens,
            ratio_max=self.ratio_max,
            mismatch=sums["mismatch"] / compared,
            mismatch_kl=sums["mismatch_kl"] / compared,
            capped_fraction=sums["capped"] / compared,
            dropped_fraction=sums["dropped"] / compared,
            grad_norm=sum(self.grad_norms) / steps,
            lr=lr,
            num_tokens=int(sums["tokens"]),
            applied_steps=len(self.grad_norms),
            skipped_steps=self.skipped_steps,
            seconds=seconds,
        )
