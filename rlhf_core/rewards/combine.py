"""The weighted sum of several sources, each part logged.

    reward = Σ weight × part        metrics: reward/<name> = the part itself, unweighted and never normalised

A sample that misses a part has no reward: a sum over fewer parts is on another scale than those it is compared
with. Its status is ``timed_out`` if a missing part timed out, else ``error``. The parts it has stay in its metrics,
so that the mean of each part is taken over the samples which that part did score.

``score``: that of the part that gives scores, if exactly one does; otherwise the plain sum, also where the reward is
normalised: success is not a matter of the running scale. Extra logs keep their names with one source and become
``<name>/<key>`` with several.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_core.records import RewardResult, RewardStatus
from rlhf_core.rewards.normalise import moments, updated
from rlhf_core.rewards.together import together

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlhf_core.records import RewardRequest
    from rlhf_core.rewards.normalise import Moments, NormState
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
        return self._totals(await self._score_parts(requests), None)

    async def score_normalised(
        self, requests: Sequence[RewardRequest], state: NormState
    ) -> tuple[list[RewardResult], NormState]:
        """As ``score``, each part on its running scale (normalise.py); and the state that the next batch needs.

        Args:
            requests: a batch; its own rewards count before they are normalised.
            state: after the previous batch, ``{}`` before the first.
        """
        by_part = await self._score_parts(requests)
        values = {
            part.name: [result.reward for result in results if result.reward is not None]
            for part, results in zip(self._parts, by_part, strict=True)
        }
        state = updated(state, values)
        return self._totals(by_part, moments(state)), state

    async def close(self) -> None:
        """Close every part."""
        await together(part.source.close() for part in self._parts)

    async def _score_parts(self, requests: Sequence[RewardRequest]) -> list[list[RewardResult]]:
        return await together(part.source.score(requests) for part in self._parts)

    def _totals(
        self, by_part: Sequence[Sequence[RewardResult]], scales: Mapping[str, Moments] | None
    ) -> list[RewardResult]:
        return [self._total(results, scales) for results in zip(*by_part, strict=True)]

    def _total(self, results: Sequence[RewardResult], scales: Mapping[str, Moments] | None) -> RewardResult:
        metrics = self._metrics(results)
        seconds = sum(result.seconds for result in results)
        missing = [(part, result) for part, result in zip(self._parts, results, strict=True) if result.reward is None]
        if missing:
            timed_out = any(result.status is RewardStatus.TIMED_OUT for _, result in missing)
            status = RewardStatus.TIMED_OUT if timed_out else RewardStatus.ERROR
            error = "; ".join(f"{part.name}: {result.error}" for part, result in missing)
            return RewardResult(status, metrics=metrics, error=error, seconds=seconds)
        values = {part.name: result.reward or 0.0 for part, result in zip(self._parts, results, strict=True)}
        plain = sum(part.weight * values[part.name] for part in self._parts)
        reward = plain
        if scales is not None:
            reward = sum(part.weight * scales[part.name].normal(values[part.name]) for part in self._parts)
        if not (math.isfinite(plain) and math.isfinite(reward)):
            error = f"the weighted sum is {plain}, normalised {reward}: check the weights of the reward's parts"
            return RewardResult(RewardStatus.ERROR, metrics=metrics, error=error, seconds=seconds)
        scores = [result.score for result in results if result.score is not None]
        score = scores[0] if len(scores) == 1 else plain
        return RewardResult(RewardStatus.OK, reward, score, metrics, seconds=seconds)

    def _metrics(self, results: Sequence[RewardResult]) -> dict[str, float]:
        metrics = {}
        for part, result in zip(self._parts, results, strict=True):
            prefix = f"{part.name}/" if len(self._parts) > 1 else ""
            metrics.update({prefix + key: value for key, value in result.metrics.items()})
            if result.reward is not None:
                metrics[f"reward/{part.name}"] = result.reward
        return metrics
