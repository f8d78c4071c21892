"""What an update did, in numbers: the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from rlhf_core.algorithms.corrections import Mismatch

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
    before: Mismatch | None = None  # of the policy before the update and who spoke; None: the advantage stage has told

    def metrics(self) -> dict[str, float]:
        """By name, without what was not measured: without an applied step that is all but the counts."""
        numbers = [item.name for item in fields(self) if item.name != "before"]
        names = numbers if self.applied_steps else COUNTS
        values = {name: getattr(self, name) for name in names}
        return {name: float(value) for name, value in values.items() if value is not None}

    def advantage_metrics(self) -> dict[str, float]:
        """What the advantage stage says of the policy before the update, where it does not ask it; else nothing."""
        if self.before is None:
            return {}
        return {**self.before.metrics(), **({} if self.kl is None else {"kl/mean": self.kl})}


def update_report(
    tally: StepsTally, *, lr: float, seconds: float, has_reference: bool, reuses_logprobs: bool = False
) -> UpdateReport:
    """One update in numbers; without an applied step, means are 0.

    Args:
        tally: of its steps, with the names ``SUMS`` and ``PEAKS``.
        lr: of the last step.
        seconds: of the whole update.
        has_reference: a KL from it was measured.
        reuses_logprobs: the log-probs before the update are its own.
    """
    sums = tally.sums
    tokens, compared = max(sums["tokens"], 1.0), max(sums["compared"], 1.0)
    steps = max(tally.applied, 1)
    before = None
    if reuses_logprobs and tally.applied:
        before = Mismatch(
            num_tokens=int(sums["tokens"]),
            abs_sum=sums["log_weight_abs"],
            weight_sum=sums["weight"],
            weight_squared_sum=sums["weight_squared"],
            abs_max=tally.peaks["log_weight_abs"],
        )
    return UpdateReport(
        policy_loss=sums["policy_loss"] / steps,
        aux_loss=sums["aux_loss"] / steps or None,  # a balancing loss is never 0: the expert chosen has a probability
        kl=sums["kl"] / tokens if has_reference and tally.applied else None,  # not measured is not 0
        entropy=sums["entropy"] / tokens,
        clip_fraction=sums["clipped"] / tokens,
        approx_kl=sums["approx_kl"] / tokens,
        ratio_mean=sums["ratio"] / tokens,
        ratio_max=tally.peaks.get("ratio", 0.0),
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
        before=before,
    )
