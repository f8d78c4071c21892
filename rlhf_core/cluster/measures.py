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


def rollout_metrics(rows: Sequence[Trajectory], seconds: float) -> dict[str, float]:
    """Numbers of a rollout. Lengths are of answers, in tokens; ``seconds`` is the wall time of this attempt."""
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
        "rollout/tokens_per_second": throughput(float(actions.sum()), seconds),
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
    evaluation = config.eval
    groups: dict[str, ScoredGroup] = {}
    for row in rows:
        group = groups.setdefault(row.group_id, ScoredGroup(row.datasource, []))
        if row.score is not None:
            list.append(group.scores, row.score)  # type: ignore[arg-type]
    scored = list(groups.values())
    rewards = [row.reward for row in rows if row.reward is not None]
    metrics = {
        "eval/prompts": float(len(scored)),
        "eval/failed": float(len(rows) - len(rewards)),
        "eval/reward_mean": float(np.mean(rewards)) if rewards else 0.0,
        "eval/length_mean": float(np.mean([row.num_actions for row in rows])),
    }
    score = mean_score(scored)
    if score is not None:
        metrics["eval/score_mean"] = score
    n = evaluation.n_samples_per_prompt
    for k in evaluation.pass_k or sorted({1, n}):
        value = mean_pass_at_k(scored, k, evaluation.success_threshold)
        if value is None:
            continue
        metrics[f"eval/pass@{k}"] = value
        # Of a mean over prompts of values in 0..1; for people who compare two versions.
        metrics[f"eval/pass@{k}_stderr"] = float(np.sqrt(value * (1 - value) / max(1, len(scored))))
        if len({group.datasource for group in scored}) > 1:
            named = by_datasource(scored, lambda members, k=k: mean_pass_at_k(members, k, evaluation.success_threshold))  # type: ignore[misc]
            metrics.update({f"eval/{source}/pass@{k}": value for source, value in named.items()})
    return metrics


def readable(row: Trajectory) -> dict[str, Any]:
    """A row of the tables that people read."""
    mask = action_mask(row.action_ranges, len(row.token_ids))
    logprobs = row.rollout_logprobs[mask]
    return {
        "group": row.group_id,
        "sample": row.sample_index,
        "prompt": row.prompt,
        "answer": row.answer if row.error is None else f"[failed] {row.error}",
        "label": row.label,
        "reward": row.reward,
        "score": row.score,
        "tokens": row.num_actions,
        "logprob": round(float(logprobs.mean()), 4) if logprobs.size else None,
        "stop": str(row.stop_reason),
    }
