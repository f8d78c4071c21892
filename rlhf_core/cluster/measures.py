"""What is reported of each stage: metrics by name, and rows that people read."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.algorithms.passk import ScoredGroup, by_datasource, mean_pass_at_k, mean_score
from rlhf_core.records import RewardStatus, Trajectory, action_mask
from rlhf_core.telemetry import throughput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.config import Config
    from rlhf_core.storage import RewardRow


@dataclass(frozen=True, slots=True)
class RolloutTally:
    """What is counted of a rollout: tallies add up, so that one made in rounds is reported as one."""

    samples: int = 0
    failed: int = 0
    tokens: int = 0  # of the answers that did not fail
    longest: int = 0  # of them, in tokens
    truncated: int = 0
    stops: dict[str, int] = field(default_factory=dict)  # stop reason -> samples
    sampled_tokens: int = 0  # by this attempt, not found published by an earlier one
    seconds: float = 0.0  # wall time of this attempt

    def __add__(self, other: RolloutTally) -> RolloutTally:
        return RolloutTally(
            samples=self.samples + other.samples,
            failed=self.failed + other.failed,
            tokens=self.tokens + other.tokens,
            longest=max(self.longest, other.longest),
            truncated=self.truncated + other.truncated,
            stops=dict(Counter(self.stops) + Counter(other.stops)),
            sampled_tokens=self.sampled_tokens + other.sampled_tokens,
            seconds=self.seconds + other.seconds,
        )

    def metrics(self) -> dict[str, float]:
        """Numbers of a rollout; lengths are of answers, in tokens."""
        usable, samples = max(1, self.samples - self.failed), max(1, self.samples)
        return {
            "rollout/samples": float(self.samples),
            "rollout/failed": float(self.failed),
            "rollout/tokens": float(self.tokens),
            "rollout/length_mean": self.tokens / usable,
            "rollout/length_max": float(self.longest),
            "rollout/truncated_share": self.truncated / usable,
            "rollout/seconds": self.seconds,
            "rollout/tokens_per_second": throughput(float(self.sampled_tokens), self.seconds),
            **{f"rollout/stop_{reason}": count / samples for reason, count in sorted(self.stops.items())},
        }


def tally_rollout(sampled: Sequence[Trajectory], seconds: float, found: Sequence[Trajectory] = ()) -> RolloutTally:
    """Count a rollout.

    Args:
        sampled: rows of this attempt.
        seconds: its wall time.
        found: rows an earlier attempt published: part of the rollout, not of its speed.
    """
    rows = [*found, *sampled]
    usable = [row for row in rows if not row.failed]
    return RolloutTally(
        samples=len(rows),
        failed=len(rows) - len(usable),
        tokens=sum(row.num_actions for row in usable),
        longest=max((row.num_actions for row in usable), default=0),
        truncated=sum(row.stop_reason.truncated for row in usable),
        stops=dict(Counter(str(row.stop_reason) for row in rows)),
        sampled_tokens=sum(row.num_actions for row in sampled),
        seconds=seconds,
    )


def staleness_metrics(rows: Sequence[Trajectory], version: int) -> dict[str, float]:
    """How many policy versions lie between the one that spoke a token and ``version``, which is trained."""
    spans = [span for row in rows for span in row.version_spans if span.end > span.start]
    tokens = sum(span.end - span.start for span in spans)
    if not tokens:
        return {}
    return {
        "rollout/staleness_max": float(max(version - span.version for span in spans)),
        "rollout/staleness_mean": sum((version - span.version) * (span.end - span.start) for span in spans) / tokens,
    }


def source_metrics(rows: Sequence[Trajectory]) -> dict[str, float]:
    """Which policy versions of its source spoke the tokens that a replay trains on. They are none of its own."""
    versions = [span.version for row in rows for span in row.version_spans if span.end > span.start]
    if not versions:
        return {}
    return {"replay/source_version_min": float(min(versions)), "replay/source_version_max": float(max(versions))}


def reward_metrics(rows: Sequence[RewardRow], seconds: float) -> dict[str, float]:
    """Numbers of a reward stage; means are over the samples that have a value."""
    rewards = np.array([row.result.reward for row in rows if row.result.reward is not None] or [np.nan])
    scores = np.array([row.result.score for row in rows if row.result.score is not None] or [np.nan])
    statuses = Counter(row.result.status for row in rows)
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "reward/score_mean": float(scores.mean()),
        "reward/seconds": seconds,
    }
    for status, count in statuses.items():
        if status is not RewardStatus.OK:
            metrics[f"reward/{status}"] = float(count)
    parts: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.result.metrics.items():
            parts.setdefault(name, []).append(value)
    metrics.update({f"reward_log/{name.removeprefix('reward/')}": float(np.mean(v)) for name, v in parts.items()})
    return {name: value for name, value in metrics.items() if np.isfinite(value)}


def evaluation_metrics(rows: Sequence[Trajectory], config: Config) -> dict[str, float]:
    """Of scored rows; failed ones are counted and left out of the means."""
    groups = _scored_groups(rows)
    rewards = [row.reward for row in rows if row.reward is not None]
    metrics = {"eval/prompts": float(len(groups)), "eval/failed": float(len(rows) - len(rewards))}
    if rewards:
        metrics["eval/reward_mean"] = float(np.mean(rewards))
        metrics["eval/length_mean"] = float(np.mean([row.num_actions for row in rows if row.reward is not None]))
    score = mean_score(groups)
    if score is not None:
        metrics["eval/score_mean"] = score
    for k in config.eval.pass_k or sorted({1, config.eval.n_samples_per_prompt}):
        metrics.update(_pass_metrics(groups, k, config.eval.success_threshold))
    return metrics


def outcomes(rows: Sequence[Trajectory]) -> list[dict[str, Any]]:
    """What became of each held-out prompt, [P], to compare two versions prompt by prompt. A failed sample has None."""
    groups: dict[str, list[Trajectory]] = {}
    for row in rows:
        if not row.segment_index:  # segments of one sample share its reward
            groups.setdefault(row.group_id, []).append(row)
    return [
        {
            "prompt": members[0].prompt_id,
            "text_sha256": hashlib.sha256(members[0].prompt.encode()).hexdigest(),
            "rewards": [row.reward for row in members],
            "scores": [row.score for row in members],
        }
        for members in groups.values()
    ]


def readable(row: Trajectory) -> dict[str, Any]:
    """A row of the tables that people read."""
    mask = action_mask(row.action_ranges, len(row.token_ids))
    logprobs = row.rollout_logprobs[mask]
    return {
        "reward": row.reward,
        "answer": row.answer if row.error is None else f"[failed] {row.error}",
        "prompt": row.prompt,
        "label": row.label,
        "score": row.score,
        "tokens": row.num_actions,
        "logprob": round(float(logprobs.mean()), 4) if logprobs.size else None,
        "stop": str(row.stop_reason),
        "group": row.group_id,
        "sample": row.sample_index,
    }


def _scored_groups(rows: Sequence[Trajectory]) -> list[ScoredGroup]:
    """One a prompt, also where none of its samples has a score."""
    scores: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        of_prompt = scores.setdefault((row.group_id, row.datasource), [])
        if row.score is not None:
            of_prompt.append(row.score)
    return [ScoredGroup(datasource, listed) for (_, datasource), listed in scores.items()]


def _pass_metrics(groups: Sequence[ScoredGroup], k: int, threshold: float) -> dict[str, float]:
    """pass@k in all and, where there are several, by datasource; nothing where no prompt has k scored samples."""

    def measure(members: Sequence[ScoredGroup]) -> float | None:
        return mean_pass_at_k(members, k, threshold)

    value = measure(groups)
    if value is None:
        return {}
    counted = sum(len(group.scores) >= k for group in groups)
    metrics = {
        f"eval/pass@{k}": value,
        # At most: the standard error of a mean over prompts of values in 0..1. For people who compare two versions.
        f"eval/pass@{k}_stderr": float(np.sqrt(value * (1 - value) / counted)),
    }
    if len({group.datasource for group in groups}) > 1:
        named = by_datasource(groups, measure)
        metrics.update({f"eval/{datasource}/pass@{k}": part for datasource, part in named.items()})
    return metrics
