"""What is reported of each stage: metrics by name, and rows that people read."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rlhf_core.agents.multi_turn.executor import METRIC
from rlhf_core.algorithms.passk import ScoredGroup, by_datasource, mean_pass_at_k, mean_score
from rlhf_core.records import EpisodeRows, RewardStatus, Trajectory, action_mask, episodes_of
from rlhf_core.telemetry import throughput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.config import Config
    from rlhf_core.storage import RewardRow

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class RolloutTally:
    """What is counted of a rollout: tallies add up, so that one made in rounds is reported as one."""

    samples: int = 0
    failed: int = 0
    tokens: int = 0  # of the answers that did not fail
    longest: int = 0  # of them, in tokens
    turns: int = 0  # of them: times the policy spoke
    segments: int = 0  # rows of all samples: more than samples where token prefixes broke
    truncated: int = 0
    stops: dict[str, int] = field(default_factory=dict)  # stop reason -> samples
    logs: dict[str, float] = field(default_factory=dict)  # metric of the executor -> its sum over them
    logged: dict[str, int] = field(default_factory=dict)  # metric of the executor -> how many of them have it
    sampled_tokens: int = 0  # by this attempt, not found published by an earlier one
    seconds: float = 0.0  # wall time of this attempt

    def __add__(self, other: RolloutTally) -> RolloutTally:
        return RolloutTally(
            samples=self.samples + other.samples,
            failed=self.failed + other.failed,
            tokens=self.tokens + other.tokens,
            longest=max(self.longest, other.longest),
            turns=self.turns + other.turns,
            segments=self.segments + other.segments,
            truncated=self.truncated + other.truncated,
            stops=_added(self.stops, other.stops),
            logs=_added(self.logs, other.logs),
            logged=_added(self.logged, other.logged),
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
            "rollout/turns_mean": self.turns / usable,
            "rollout/segments": float(self.segments),
            "rollout/truncated_share": self.truncated / usable,
            "rollout/seconds": self.seconds,
            "rollout/tokens_per_second": throughput(float(self.sampled_tokens), self.seconds),
            **{f"rollout/stop_{reason}": count / samples for reason, count in sorted(self.stops.items())},
            **{name: self.logs[name] / count for name, count in sorted(self.logged.items())},
        }


def tally_rollout(sampled: Sequence[Trajectory], seconds: float, found: Sequence[Trajectory] = ()) -> RolloutTally:
    """Count a rollout.

    Args:
        sampled: rows of this attempt.
        seconds: its wall time.
        found: rows an earlier attempt published: part of the rollout, not of its speed.
    """
    rows = [*found, *sampled]
    episodes = episodes_of(rows)
    usable = [episode for episode in episodes if not episode.failed]
    logs = _logs(usable)
    return RolloutTally(
        samples=len(episodes),
        failed=len(episodes) - len(usable),
        tokens=sum(episode.num_actions for episode in usable),
        longest=max((episode.num_actions for episode in usable), default=0),
        turns=sum(episode.num_turns for episode in usable),
        segments=len(rows),
        truncated=sum(episode.truncated for episode in usable),
        stops=dict(Counter(str(episode.stop_reason) for episode in episodes)),
        logs={name: sum(values) for name, values in logs.items()},
        logged={name: len(values) for name, values in logs.items()},
        sampled_tokens=sum(row.num_actions for row in sampled),
        seconds=seconds,
    )


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
    episodes = episodes_of(rows)
    groups = _scored_groups(episodes)
    scored = [episode for episode in episodes if episode.last.reward is not None]
    metrics = {"eval/prompts": float(len(groups)), "eval/failed": float(len(episodes) - len(scored))}
    metrics |= {f"eval/{name}": value for name, value in _of_episodes(scored).items()}
    of_sources = datasource_metrics(rows, config.eval.success_threshold)
    metrics |= {f"eval/{name}": value for name, value in of_sources.items()}
    logs = {
        name: values for name, values in _logs(scored).items() if name.startswith(METRIC)
    }  # not the reward source's
    metrics |= {f"eval/{name}": float(np.mean(values)) for name, values in logs.items()}
    score = mean_score(groups)
    if score is not None:
        metrics["eval/score_mean"] = score
    for k in config.eval.pass_k or sorted({1, config.eval.n_samples_per_prompt}):
        metrics.update(_pass_metrics(groups, k, config.eval.success_threshold))
    return metrics


def datasource_metrics(rows: Sequence[Trajectory], threshold: float) -> dict[str, float]:
    """Of scored rows, by datasource: ``<datasource>/reward_mean`` and so on; {} if there is only one datasource.

    ``success`` is the share of episodes with a score of at least ``threshold``; those without a score are left out.
    """
    sources: dict[str, list[EpisodeRows]] = {}
    for episode in episodes_of(rows):
        sources.setdefault(episode.last.datasource, []).append(episode)
    if len(sources) < 2:
        return {}
    metrics: dict[str, float] = {}
    for source, members in sorted(sources.items()):
        scored = [episode for episode in members if episode.last.reward is not None]
        scores = [episode.last.score for episode in scored if episode.last.score is not None]
        named = {"samples": float(len(members)), **_of_episodes(scored)}
        if scores:
            named["score_mean"] = float(np.mean(scores))
            named["success"] = sum(score >= threshold for score in scores) / len(scores)
        metrics |= {f"{source}/{name}": value for name, value in named.items()}
    return metrics


def outcomes(rows: Sequence[Trajectory]) -> list[dict[str, Any]]:
    """What became of each held-out prompt, [P], to compare two versions prompt by prompt. A failed sample has None."""
    groups: dict[str, list[Trajectory]] = {}
    for episode in episodes_of(rows):  # the segments of one sample share its reward
        groups.setdefault(episode.last.group_id, []).append(episode.last)
    return [
        {
            "prompt": members[0].prompt_id,
            "text_sha256": hashlib.sha256(members[0].prompt.encode()).hexdigest(),
            "rewards": [row.reward for row in members],
            "scores": [row.score for row in members],
        }
        for members in groups.values()
    ]


def readable(episode: EpisodeRows) -> dict[str, Any]:
    """A row of the tables that people read: one for each episode."""
    spoken = [row.rollout_logprobs[action_mask(row.action_ranges, len(row.token_ids))] for row in episode.rows]
    logprobs = np.concatenate(spoken)
    row = episode.last
    answers = [part.transcript or part.answer for part in episode.rows]  # all turns of a segment
    if len(answers) > 1:
        answers = [f"[segment {number}] {answer}" for number, answer in enumerate(answers)]
    return {
        "reward": row.reward,
        "answer": "\n".join(answers) if not episode.failed else f"[failed] {episode.error or episode.stop_reason}",
        "prompt": row.prompt,
        "label": row.label,
        "score": row.score,
        "tokens": episode.num_actions,
        "logprob": round(float(logprobs.mean()), 4) if logprobs.size else None,
        "stop": str(episode.stop_reason),
        "group": row.group_id,
        "sample": row.sample_index,
    }


def _logs(episodes: Sequence[EpisodeRows]) -> dict[str, list[float]]:
    """What executors and agents counted, by name: a number for each episode that has it, from its last segment."""
    logs: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.last.metrics.items():
            logs.setdefault(name, []).append(value)
    return logs


def _added(one: dict[str, _Number], other: dict[str, _Number]) -> dict[str, _Number]:
    """Sums by name."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in one.keys() | other.keys()}


def _of_episodes(episodes: Sequence[EpisodeRows]) -> dict[str, float]:
    """Means over episodes that have a reward; nothing without one."""
    if not episodes:
        return {}
    return {
        "reward_mean": float(np.mean([episode.last.reward for episode in episodes])),
        "length_mean": float(np.mean([episode.num_actions for episode in episodes])),
        "turns_mean": float(np.mean([episode.num_turns for episode in episodes])),
    }


def _scored_groups(episodes: Sequence[EpisodeRows]) -> list[ScoredGroup]:
    """One a prompt, also where none of its samples has a score."""
    scores: dict[tuple[str, str], list[float]] = {}
    for row in (episode.last for episode in episodes):
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
