"""What is reported of each stage: metrics by name, and rows that people read."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.algorithms.passk import ScoredGroup, by_datasource, mean_pass_at_k, mean_score
from rlhf_core.records import RewardStatus, Trajectory, action_mask
from rlhf_core.telemetry import throughput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.config import Config
    from rlhf_core.storage import RewardRow


def rollout_metrics(
    sampled: Sequence[Trajectory], seconds: float, found: Sequence[Trajectory] = ()
) -> dict[str, float]:
    """Numbers of a rollout; lengths are of answers, in tokens.

    Args:
        sampled: rows of this attempt.
        seconds: its wall time.
        found: rows an earlier attempt published: part of the rollout, not of its speed.
    """
    rows = [*found, *sampled]
    usable = [row for row in rows if not row.failed]
    actions = np.array([row.num_actions for row in usable] or [0])
    stops = Counter(row.stop_reason for row in rows)
    return {
        "rollout/samples": float(len(rows)),
        "rollout/failed": float(len(rows) - len(usable)),
        "rollout/tokens": float(actions.sum()),
        "rollout/length_mean": float(actions.mean()),
        "rollout/length_max": float(actions.max()),
        "rollout/truncated_share": sum(row.stop_reason.truncated for row in usable) / max(1, len(usable)),
        "rollout/seconds": seconds,
        "rollout/tokens_per_second": throughput(float(sum(row.num_actions for row in sampled)), seconds),
        **{f"rollout/stop_{reason}": count / max(1, len(rows)) for reason, count in sorted(stops.items())},
    }


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
