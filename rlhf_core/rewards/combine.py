"""The weighted sum of several sources, each part logged.

    reward = Σ weight × part        metrics: reward/<name> = the part itself, unweighted

A sample that misses a part has no reward: a sum over fewer parts is on another scale than those it is compared
with. Its status is ``timed_out`` if a missing part timed out, else ``error``. The parts it has stay in its metrics,
so that the mean of each part is taken over the samples which that part did score.

``score``: that of the function that gives scores, if exactly one does; otherwise the reward. Extra logs keep their
names with one source and become ``<name>/<key>`` with several.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_core.records import RewardResult, RewardStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.records import RewardRequest
    from rlhf_core.rewards.source import RewardSource


@dataclass(frozen=True, slots=True)
class Part:
    """One summand."""

    name: str
    weight: float
    source: RewardSource


class WeightedSum:
    """A ``RewardSource`` made of others; with one part it only adds the weight, the metric and the score."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """See ``RewardSource``. ``seconds`` is the sum over the parts."""
        by_part = await asyncio.gather(*(part.source.score(requests) for part in self._parts))
        return [self._sum(results) for results in zip(*by_part, strict=True)]

    async def close(self) -> None:
        """Close every part."""
        await asyncio.gather(*(part.source.close() for part in self._parts))

    def _sum(self, results: Sequence[RewardResult]) -> RewardResult:
        metrics = self._metrics(results)
        seconds = sum(result.seconds for result in results)
        missing = [(part, result) for part, result in zip(self._parts, results, strict=True) if result.reward is None]
        if missing:
            timed_out = any(result.status is RewardStatus.TIMED_OUT for _, result in missing)
            status = RewardStatus.TIMED_OUT if timed_out else RewardStatus.ERROR
            error = "; ".join(f"{part.name}: {result.error}" for part, result in missing)
            return RewardResult(status, metrics=metrics, error=error, seconds=seconds)
        reward = sum(part.weight * (result.reward or 0.0) for part, result in zip(self._parts, results, strict=True))
        if not math.isfinite(reward):
            error = f"the weighted sum is {reward}: check reward.functions[].weight"
            return RewardResult(RewardStatus.ERROR, metrics=metrics, error=error, seconds=seconds)
        scores = [result.score for result in results if result.score is not None]
        score = scores[0] if len(scores) == 1 else reward
        return RewardResult(RewardStatus.OK, reward, score, metrics, seconds=seconds)

    def _metrics(self, results: Sequence[RewardResult]) -> dict[str, float]:
        metrics = {}
        for part, result in zip(self._parts, results, strict=True):
            prefix = f"{part.name}/" if len(self._parts) > 1 else ""
            metrics.update({prefix + key: value for key, value in result.metrics.items()})
            if result.reward is not None:
                metrics[f"reward/{part.name}"] = result.reward
        return metrics
