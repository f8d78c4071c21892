"""The metrics of iterations under Prometheus' names."""

from rlhf_core.lineage.prometheus import ADDED, OF_ITERATION, PrometheusTracker
from rlhf_core.telemetry.exposition import RunMetrics
from rlhf_core.telemetry.families import FAMILIES


def values(metrics):
    return {
        (sample.name, *sample.labels.values()): sample.value
        for metric in metrics.collect()
        for sample in metric.samples
    }


def iteration(tracker, number, **changes):
    numbers = {"reward/mean": 0.5, "rollout/samples": 8.0, "rollout/failed": 1.0, "reward/timed_out": 2.0}
    numbers |= {"update/num_tokens": 100.0, "update/seconds": 4.0, **changes}
    tracker.log_iteration(number, numbers, [], 0.0)


def test_the_newest_iteration_is_shown_and_all_are_counted():
    metrics = RunMetrics({})
    tracker = PrometheusTracker(metrics, 0)
    iteration(tracker, 0, **{"update/kl": 0.1})
    iteration(tracker, 1, **{"reward/mean": 0.75})

    found = values(metrics)
    assert (found[("rlhf_iterations",)], found[("rlhf_reward_mean",)]) == (2, 0.75)
    assert (found[("rlhf_samples_total",)], found[("rlhf_failed_samples_total", "timed_out")]) == (16, 4)
    assert (found[("rlhf_update_tokens_total",)], found[("rlhf_update_tokens_per_second",)]) == (200, 25)
    assert ("rlhf_kl_nats",) not in found  # it was not measured this time
    assert tracker.logged_iterations() == 2


def test_a_resumed_run_shows_the_newest_and_counts_from_there():
    metrics = RunMetrics({})
    tracker = PrometheusTracker(metrics, 5)

    assert tracker.logged_iterations() == 4
    iteration(tracker, 4)
    assert (values(metrics)[("rlhf_iterations",)], ("rlhf_samples_total",) in values(metrics)) == (5, False)


def test_all_families_exist():
    assert set(OF_ITERATION) | set(ADDED) <= set(FAMILIES)
