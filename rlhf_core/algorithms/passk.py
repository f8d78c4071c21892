"""pass@k: the chance that at least one of k samples of a prompt succeeds, from n >= k samples.

Success is judged by a threshold on the score, so scores need not lie in 0..1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The scored samples of one prompt; failed ones are left out."""

    datasource: str
    scores: Sequence[float]  # [G]


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """``1 - C(n - c, k) / C(n, k)``, unbiased (Chen et al. 2021, arXiv:2107.03374).

    Raises:
        ConfigError: fewer than k samples, or more correct ones than samples.
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ConfigError(f"pass@{k} of {num_correct} correct in {num_samples} samples: it needs 1 <= k <= samples")
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def mean_pass_at_k(groups: Iterable[ScoredGroup], k: int, threshold: float) -> float | None:
    """Mean over prompts; those left with fewer than k samples do not count; None if there is no other."""
    return _mean(
        pass_at_k(len(group.scores), sum(score >= threshold for score in group.scores), k)
        for group in groups
        if len(group.scores) >= k
    )


def mean_score(groups: Iterable[ScoredGroup]) -> float | None:
    """Mean over prompts of the mean over samples; None without any."""
    return _mean(math.fsum(group.scores) / len(group.scores) for group in groups if group.scores)


def by_datasource(
    groups: Iterable[ScoredGroup], measure: Callable[[list[ScoredGroup]], float | None]
) -> dict[str, float]:
    """A measure of each datasource apart, e.g. ``lambda g: mean_pass_at_k(g, 1, 1.0)``; those without one left out."""
    sources: defaultdict[str, list[ScoredGroup]] = defaultdict(list)
    for group in groups:
        sources[group.datasource].append(group)
    measured = {source: measure(members) for source, members in sorted(sources.items())}
    return {source: value for source, value in measured.items() if value is not None}


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else None
