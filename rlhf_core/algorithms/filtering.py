"""Dynamic filtering: train only on groups that can teach something (DAPO, arXiv:2503.14476)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from rlhf_core.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Verdict(StrEnum):
    """Why a group is kept or not."""

    KEPT = "kept"
    TOO_LOW = "too_low"  # mean at or below the range: with (0, 1), all wrong
    TOO_HIGH = "too_high"  # mean at or above the range: with (0, 1), all right
    NO_SPREAD = "no_spread"  # all scores equal: nothing to compare, though the mean is inside
    FAILED = "failed"  # no usable sample: there is nothing to judge


def judge_group(scores: Sequence[float], low: float, high: float) -> Verdict:
    """Keep a group iff ``low < mean < high`` and its scores are not all equal.

    Raises:
        TrainingError: no scores; a group without any has failed, which is not a matter of filtering.
    """
    if not scores:
        raise TrainingError("a group without scores cannot be filtered: count it as failed")
    mean = math.fsum(scores) / len(scores)
    if mean <= low:
        return Verdict.TOO_LOW
    if mean >= high:
        return Verdict.TOO_HIGH
    return Verdict.NO_SPREAD if max(scores) == min(scores) else Verdict.KEPT


def keep_group(scores: Sequence[float], low: float, high: float) -> bool:
    """True if the group is trained."""
    return judge_group(scores, low, high) is Verdict.KEPT


@dataclass(frozen=True, slots=True)
class FilterCounts:
    """Groups by verdict: what is reported, and what the message says when the rounds run out."""

    kept: int = 0
    too_low: int = 0
    too_high: int = 0
    no_spread: int = 0
    failed: int = 0

    def with_verdict(self, verdict: Verdict) -> FilterCounts:
        """The counts after one more group."""
        return replace(self, **{verdict.value: getattr(self, verdict.value) + 1})

    @property
    def generated(self) -> int:
        """All groups."""
        return self.kept + self.filtered + self.failed

    @property
    def filtered(self) -> int:
        """Groups that could have been trained, and were rejected."""
        return self.too_low + self.too_high + self.no_spread

    @property
    def kept_share(self) -> float:
        """Of the groups, not of the samples: at most 1."""
        return self.kept / self.generated if self.generated else 0.0

    def __str__(self) -> str:
        return (
            f"{self.generated} groups generated, {self.kept} kept, {self.too_low} with a mean score too low, "
            f"{self.too_high} too high, {self.no_spread} without spread, {self.failed} failed"
        )
