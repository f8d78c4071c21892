"""The metrics of iterations for Prometheus: the same numbers that the other trackers get, under Prometheus' names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_core.lineage.tracker import MetricTracker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlhf_core.lineage.tracker import DatasetRecord
    from rlhf_core.telemetry.exposition import RunMetrics

# family -> the metrics of an iteration that may hold its value: the first that there is
OF_ITERATION: dict[str, tuple[str, ...]] = {
    "rlhf_reward_mean": ("reward/mean",),
    "rlhf_reward_stddev": ("reward/std",),
    "rlhf_score_mean": ("reward/score_mean",),
    "rlhf_answer_length_tokens": ("rollout/length_mean",),
    "rlhf_truncated_ratio": ("rollout/truncated_share",),
    "rlhf_kl_nats": ("update/kl", "kl/mean"),
    "rlhf_entropy_nats": ("update/entropy",),
    "rlhf_loss": ("update/policy_loss", "train/loss"),
    "rlhf_grad_norm": ("update/grad_norm", "train/grad_norm"),
    "rlhf_clip_ratio": ("update/clip_fraction",),
    "rlhf_logprob_mismatch_nats": ("mismatch/logprob_abs_mean",),
    "rlhf_staleness_versions_mean": ("rollout/staleness_mean",),
    "rlhf_staleness_versions_max": ("rollout/staleness_max",),
    "rlhf_groups_buffered": ("ledger/buffered",),
    "rlhf_rollout_tokens_per_second": ("rollout/tokens_per_second",),
}
ADDED: dict[str, tuple[str, ...]] = {
    "rlhf_rollout_tokens_total": ("rollout/tokens",),
    "rlhf_update_tokens_total": ("update/num_tokens", "train/tokens"),
    "rlhf_samples_total": ("rollout/samples", "train/examples"),
    "rlhf_skipped_steps_total": ("update/skipped_steps", "train/skipped_steps"),
}
FAILED = {"rollout": "rollout/failed", "timed_out": "reward/timed_out", "error": "reward/error"}
UPDATE_TOKENS, UPDATE_SECONDS = ADDED["rlhf_update_tokens_total"], ("update/seconds", "train/seconds")


class PrometheusTracker(MetricTracker):
    """See ``Tracker``.

    Args:
        metrics: of the run's endpoint.
        iterations: that the log had when this process began: they are not counted again, and the newest is shown.
    """

    name = "Prometheus"

    def __init__(self, metrics: RunMetrics, iterations: int) -> None:
        self._metrics = metrics
        self._counted = iterations
        self._told = max(0, iterations - 1)

    def start(self, run_id: str, config: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Nothing: the endpoint is there."""

    def logged_iterations(self) -> int:
        """Iterations up to the one that is shown."""
        return self._told

    def log_iteration(
        self, iteration: int, metrics: Mapping[str, float], inputs: Sequence[DatasetRecord], ended_at: float
    ) -> None:
        """Show its numbers in place of the one before."""
        shown = self._metrics
        shown.set("rlhf_iterations", iteration + 1)
        for family, names in OF_ITERATION.items():
            value = _first(metrics, names)
            shown.forget(family) if value is None else shown.set(family, value)
        seconds, tokens = _first(metrics, UPDATE_SECONDS), _first(metrics, UPDATE_TOKENS)
        if seconds and tokens is not None:
            shown.set("rlhf_update_tokens_per_second", tokens / seconds)
        if iteration >= self._counted:
            for family, names in ADDED.items():
                shown.add(family, _first(metrics, names) or 0.0)
            for kind, name in FAILED.items():
                shown.add("rlhf_failed_samples_total", metrics.get(name, 0.0), kind=kind)
        self._told = iteration + 1

    def log_evaluation(self, version: int, metrics: Mapping[str, float], ended_at: float) -> None:
        """Show it in place of the one before."""
        self._metrics.set("rlhf_evaluation_policy_version", version)
        if "eval/score_mean" in metrics:
            self._metrics.set("rlhf_evaluation_score", metrics["eval/score_mean"])

    def finish(self, succeeded: bool) -> None:
        """Nothing: the endpoint goes with the process's work on the run."""


def _first(metrics: Mapping[str, float], names: Sequence[str]) -> float | None:
    return next((metrics[name] for name in names if name in metrics), None)
