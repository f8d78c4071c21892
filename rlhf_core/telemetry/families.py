"""Every metric family of a run: name, kind, labels, and what it means. The table of docs/observability.md is made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Family:
    """One metric."""

    kind: Literal["gauge", "counter", "summary"]
    help: str
    labels: tuple[str, ...] = ()  # besides run_id, pipeline, algorithm


def _gauge(help: str, *labels: str) -> Family:
    return Family("gauge", help, labels)


def _counter(help: str, *labels: str) -> Family:
    return Family("counter", help, labels)


FAMILIES: dict[str, Family] = {
    # how far
    "rlhf_iterations": _gauge("Iterations that the run's log has"),
    "rlhf_iterations_planned": _gauge("Iterations of the whole run"),
    "rlhf_stage_active": _gauge("How many of a stage are under way", "stage"),
    "rlhf_stage_seconds": Family("summary", "Wall time of stages that ended well, waiting included", ("stage",)),
    "rlhf_stage_errors_total": _counter("Stages that failed, by the kind of error", "stage", "error"),
    "rlhf_worker_rebuilds_total": _counter("Times that workers died and were made again"),
    # of the newest iteration
    "rlhf_reward_mean": _gauge("Mean reward of the newest iteration's samples"),
    "rlhf_reward_stddev": _gauge("Standard deviation of the rewards"),
    "rlhf_score_mean": _gauge("Mean score, before penalties and normalisation"),
    "rlhf_answer_length_tokens": _gauge("Mean length of the answers"),
    "rlhf_truncated_ratio": _gauge("Share of answers that were cut off at a limit"),
    "rlhf_kl_nats": _gauge("Mean KL from the reference per token"),
    "rlhf_entropy_nats": _gauge("Mean entropy of the policy per token"),
    "rlhf_loss": _gauge("Policy loss; of supervised runs their loss"),
    "rlhf_grad_norm": _gauge("Norm of the gradient before clipping"),
    "rlhf_clip_ratio": _gauge("Share of tokens whose gradient the clip took away"),
    "rlhf_logprob_mismatch_nats": _gauge("Mean distance of the engine's log-probs from the trainer's"),
    "rlhf_staleness_versions_mean": _gauge("Versions between the one that spoke and the one that is trained, mean"),
    "rlhf_staleness_versions_max": _gauge("Versions between the one that spoke and the one that is trained, largest"),
    "rlhf_groups_buffered": _gauge("Groups that are kept for the next iterations"),
    "rlhf_evaluation_score": _gauge("Mean score of the newest evaluation"),
    "rlhf_evaluation_policy_version": _gauge("Policy version of the newest evaluation"),
    # how fast
    "rlhf_rollout_tokens_total": _counter("Tokens of answers, of iterations that are over"),
    "rlhf_rollout_tokens_per_second": _gauge("Speed of the newest rollout"),
    "rlhf_update_tokens_total": _counter("Tokens that were trained on"),
    "rlhf_update_tokens_per_second": _gauge("Speed of the newest update"),
    "rlhf_weight_sync_seconds": Family("summary", "Wall time of handing weights to the engines"),
    # what failed
    "rlhf_samples_total": _counter("Samples of iterations that are over"),
    "rlhf_failed_samples_total": _counter(
        "Samples that were not trained: kind rollout, or the reward's status", "kind"
    ),
    "rlhf_skipped_steps_total": _counter("Optimizer steps that were left out, because they were not finite"),
    # now
    "rlhf_groups_in_flight": _gauge("Groups that are being sampled"),
    "rlhf_engine_requests_running": _gauge("Requests that an engine decodes", "engine"),
    "rlhf_engine_requests_waiting": _gauge("Requests that wait in an engine's queue", "engine"),
    "rlhf_engine_kv_cache_usage_ratio": _gauge("Share of an engine's KV cache that is taken", "engine"),
    "rlhf_engine_tokens_total": _counter("Tokens that an engine has sampled since it started", "engine"),
    "rlhf_process_resident_memory_bytes": _gauge("Resident memory of a process and its children", "process"),
    "rlhf_object_store_used_bytes": _gauge("Ray's object store: bytes taken", "node"),
    "rlhf_object_store_capacity_bytes": _gauge("Ray's object store: bytes there are", "node"),
    "rlhf_gpu_memory_used_bytes": _gauge("Memory of a GPU that is taken, by whomever", "node", "gpu"),
    "rlhf_gpu_memory_total_bytes": _gauge("Memory of a GPU", "node", "gpu"),
    "rlhf_gpu_utilization_ratio": _gauge("Share of the last moments in which a GPU computed", "node", "gpu"),
    "rlhf_observed_timestamp_seconds": _gauge("When the processes were last looked at, unix time"),
}
