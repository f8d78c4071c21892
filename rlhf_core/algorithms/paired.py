"""Two models on the same prompts: the mean of the differences, and how sure it is.

The prompts are the sample: differences of one prompt are taken first, so what makes a prompt hard for both does not count as
noise. The standard error is that of a mean, ``s / sqrt(n)`` with ``s² = Σ (d - d̄)² / (n - 1)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ROUNDING = 1e-9  # 0.6 - 0.5 is a little less than 0.1, and clears a margin of 0.1


@dataclass(frozen=True, slots=True)
class Paired:
    """Challenger minus champion, over ``prompts`` prompts."""

    prompts: int
    champion: float  # mean
    challenger: float  # mean
    difference: float
    standard_error: float | None  # of the difference; None for a single prompt
    better: int  # prompts
    worse: int

    def clears(self, margin: float, standard_errors: float) -> bool:
        """True if the challenger is better at all, by ``margin``, and by so many standard errors."""
        if self.difference <= ROUNDING or self.difference < margin - ROUNDING:
            return False
        if standard_errors == 0:
            return True
        return self.standard_error is not None and self.difference >= standard_errors * self.standard_error


def paired(champion: Sequence[float], challenger: Sequence[float]) -> Paired:
    """Compare the values of two models, [P] each, prompt by prompt; at least one."""
    differences = [new - old for old, new in zip(champion, challenger, strict=True)]
    count = len(differences)
    mean = math.fsum(differences) / count
    error = None
    if count > 1:
        variance = math.fsum((difference - mean) ** 2 for difference in differences) / (count - 1)
        error = math.sqrt(variance / count)
    return Paired(
        prompts=count,
        champion=math.fsum(champion) / count,
        challenger=math.fsum(challenger) / count,
        difference=mean,
        standard_error=error,
        better=sum(difference > 0 for difference in differences),
        worse=sum(difference < 0 for difference in differences),
    )
