"""Running normalisation of each part of a reward (``reward.normalize_enable``). Pure: the state goes in and comes out.

    reward = Σ weight × (part - mean) / max(std, MIN_STD)      mean and std: of all the part gave so far, this batch included

A part is one source: its scale may be anything, and drifts as the policy learns. The state is JSON: it is kept in the
log with each iteration's rewards, so that a resumed run, or a stage that is tried again, goes on with the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MIN_STD = 1e-8  # a part that always gives the same is 0, not rounding noise divided by nothing

NormState: TypeAlias = "dict[str, dict[str, float]]"  # part -> count, mean, m2; {} before the first batch


@dataclass(frozen=True, slots=True)
class Moments:
    """Of all values of one part so far.

    >>> Moments().with_values([1.0, 3.0])
    Moments(count=2.0, mean=2.0, m2=2.0)
    """

    count: float = 0.0
    mean: float = 0.0
    m2: float = 0.0  # sum of squared distances from the mean

    @property
    def std(self) -> float:
        """Biased, as usual for a running scale; 0 before there are two values."""
        return math.sqrt(self.m2 / self.count) if self.count else 0.0

    def with_values(self, values: Sequence[float]) -> Moments:
        """The moments with a batch added (Chan, Golub and LeVeque 1979, formula 2.1).

        Distances are taken from the first value, so that equal values have a spread of exactly 0.
        """
        if not values:
            return self
        first, count = values[0], len(values)
        mean = first + math.fsum(value - first for value in values) / count
        m2 = math.fsum((value - mean) ** 2 for value in values)
        if not self.count:
            return Moments(float(count), mean, m2)
        total, delta = self.count + count, mean - self.mean
        share = count / total
        return Moments(total, self.mean + delta * share, self.m2 + m2 + delta * delta * self.count * share)

    def normal(self, value: float) -> float:
        """The value on the part's own scale."""
        return (value - self.mean) / max(self.std, MIN_STD)


def moments(state: NormState) -> dict[str, Moments]:
    """The state in its working form."""
    return {name: Moments(**entry) for name, entry in state.items()}


def updated(state: NormState, values: Mapping[str, Sequence[float]]) -> NormState:
    """The state after a batch: the rewards that each part gave, those it failed to give left out."""
    known = moments(state)
    new = {name: known.get(name, Moments()).with_values(batch) for name, batch in values.items()}
    return state | {name: asdict(entry) for name, entry in new.items() if entry.count}


def normalisation_metrics(state: NormState) -> dict[str, float]:
    """What is reported of the state: mean and standard deviation of each part."""
    metrics = {}
    for name, entry in moments(state).items():
        metrics[f"reward_norm/{name}_mean"] = entry.mean
        metrics[f"reward_norm/{name}_std"] = entry.std
    return metrics
