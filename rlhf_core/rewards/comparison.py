"""Two rewards for the same answers, compared.

    old  .2  .9  .4 | 1  0          of the run
    new  1.  3.  5. | 2  2          of another source; | between groups

Rewards on different scales are compared by what training makes of them: an answer is better or worse than the others of its
group. So beside the correlations there are, over groups of several,

    advantage_sign_changed   samples that changed sides of their group's mean (above, at, below)
    order_changed            samples that changed places with another one of their group
    pairs_swapped            pairs of a group of which one reward prefers one answer, and the other the other

and a sample *moves* by the difference of its ranks (0 lowest, 1 highest, ties in the middle) among all samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

EQUAL = 1e-9  # of a group's largest reward: nearer to its mean is at it, for a mean of floats is rarely one of them


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """``N`` samples that have both rewards."""

    groups: NDArray[np.int64]  # [N] a number per group
    old: NDArray[np.float64]  # [N]
    new: NDArray[np.float64]  # [N]

    def summary(self) -> dict[str, Any]:
        """Numbers as JSON; None where they do not exist: the correlation with a constant, an order within groups of one."""
        return {
            "compared": len(self.old),
            "groups": len(np.unique(self.groups)),
            "old": moments(self.old),
            "new": moments(self.new),
            "pearson": _pearson(self.old, self.new),
            "spearman": _pearson(ranks(self.old), ranks(self.new)),
            **self._within_groups(),
        }

    def moves(self) -> NDArray[np.float64]:
        """``[N]`` rank by the new reward minus rank by the old one, in -1..1."""
        difference: NDArray[np.float64] = ranks(self.new) - ranks(self.old)
        return difference

    def moved_most(self, count: int) -> list[int]:
        """Indices of the samples that moved furthest, furthest first."""
        distance = np.abs(self.moves())
        order = np.lexsort((-np.abs(self.new - self.old), -distance))[:count]
        return [int(index) for index in order if distance[index] > 0]

    def _within_groups(self) -> dict[str, float | None]:
        order = np.argsort(self.groups, kind="stable")
        borders = np.flatnonzero(np.diff(self.groups[order])) + 1
        samples = pairs = sides = moved = swapped = 0
        for members in np.split(order, borders):
            if len(members) < 2:
                continue
            old, new = self.old[members], self.new[members]
            opposite = _prefers(old) * _prefers(new) < 0  # [G, G], both ways
            samples += len(members)
            pairs += len(members) * (len(members) - 1) // 2
            sides += int((_side(old) != _side(new)).sum())
            moved += int(opposite.any(axis=1).sum())
            swapped += int(opposite.sum()) // 2
        return {
            "advantage_sign_changed": sides / samples if samples else None,
            "order_changed": moved / samples if samples else None,
            "pairs_swapped": swapped / pairs if pairs else None,
        }


def ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """``[N]`` ranks from 0 to 1; equal values share the middle of theirs. A single value is at 0.5."""
    if not len(values):
        return values
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    middles = ends - (counts + 1) / 2
    middle: NDArray[np.float64] = middles[inverse] / (len(values) - 1) if len(values) > 1 else np.full(1, 0.5)
    return middle


def moments(values: NDArray[np.float64] | Sequence[float]) -> dict[str, float | None]:
    """``mean``, ``std``, ``min``, ``max``; None without values."""
    if not len(values):
        return dict.fromkeys(("mean", "std", "min", "max"))
    array = np.asarray(values, np.float64)
    return {
        "mean": float(array.mean()),
        "std": float(array.std()),
        "min": float(array.min()),
        "max": float(array.max()),
    }


def _pearson(left: NDArray[np.float64], right: NDArray[np.float64]) -> float | None:
    if len(left) < 2 or np.ptp(left) == 0 or np.ptp(right) == 0:
        return None
    value = float(np.corrcoef(left, right)[0, 1])
    return value if np.isfinite(value) else None  # rewards so large that their squares overflow


def _prefers(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """``[G, G]`` 1 where the row's answer is better than the column's, -1 where it is worse."""
    return np.sign(values[:, None] - values[None, :])


def _side(values: NDArray[np.float64]) -> NDArray[np.float64]:
    distance = values - values.mean()
    tolerance = EQUAL * max(float(np.abs(values).max()), 1e-300)
    side: NDArray[np.float64] = np.where(np.abs(distance) <= tolerance, 0.0, np.sign(distance))
    return side
