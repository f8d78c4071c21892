"""What the endpoint is told of stages and processes."""

import asyncio
from types import SimpleNamespace

import pytest
from task_samples import complete, open_run

from rlhf_core.cluster.observation import NodeSight, Sight
from rlhf_core.generation.load import EngineLoad
from rlhf_core.telemetry import here
from rlhf_core.telemetry.exposition import RunMetrics
from rlhf_core.telemetry.machine import Gpu
from tasks import watch
from tasks.watch import at_stage, show, watched, what_it_is


@at_stage("update")
async def work(run_id, iteration, act=None):
    place = here()
    if act is not None:
        await act()
    return place


def values(metrics):
    return {
        (sample.name, *sample.labels.values()): sample.value
        for metric in metrics.collect()
        for sample in metric.samples
    }


@pytest.fixture
def metrics(monkeypatch):
    made = RunMetrics({})
    monkeypatch.setitem(watch._WATCHED, "run", made)
    return made


async def test_a_stage_is_counted_and_timed(metrics):
    async def look():
        assert values(metrics)[("rlhf_stage_active", "update")] == 1

    place = await work("run", 3, look)

    assert (place.run_id, place.stage, place.iteration) == ("run", "update", 3)
    found = values(metrics)
    assert (found[("rlhf_stage_active", "update")], found[("rlhf_stage_seconds_count", "update")]) == (0, 1)


async def test_a_stage_that_fails_is_counted_by_its_error(metrics):
    async def fail():
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        await work("run", 3, fail)

    found = values(metrics)
    assert found == {("rlhf_stage_active", "update"): 0, ("rlhf_stage_errors_total", "update", "ValueError"): 1}


async def test_without_an_endpoint_the_place_is_known_all_the_same():
    assert (await work("nobody", 4)).iteration == 4


def sight(**changes):
    node = NodeSight({"controller": 100, "engine-0": 200}, [Gpu(0, 5, 10, 0.5)], 7, 70)
    seen = {"engines": {"engine-0": EngineLoad(3, 4, 0.25, 99)}, "groups_in_flight": 2, "nodes": {"10.0.0.1": node}}
    return Sight(**(seen | changes))


def test_who_is_gone_is_not_shown_any_more():
    metrics = RunMetrics({})
    run = SimpleNamespace(session=SimpleNamespace(restarts=["one"], syncs=2, sync_seconds=3.0))
    show(metrics, run, sight())
    before = values(metrics)
    show(metrics, run, sight(engines={}, nodes={}))

    assert before[("rlhf_engine_requests_waiting", "engine-0")] == 4
    assert before[("rlhf_process_resident_memory_bytes", "engine-0")] == 200
    assert before[("rlhf_gpu_utilization_ratio", "10.0.0.1", "0")] == 0.5
    assert (before[("rlhf_worker_rebuilds_total",)], before[("rlhf_weight_sync_seconds_sum",)]) == (1, 3.0)
    after = values(metrics)
    assert (after[("rlhf_engine_tokens_total", "engine-0")], after[("rlhf_groups_in_flight",)]) == (99, 2)
    assert not [found for found in after if "requests" in found[0] or "memory" in found[0]]


@pytest.mark.parametrize(
    ("overrides", "pipeline"),
    [
        ([], "sync"),
        (["train.async_enable=true"], "async"),
        (["train.async_enable=true", "train.partial_rollout_enable=true"], "partial"),
    ],
)
def test_what_a_run_is(tmp_path, overrides, pipeline):
    run = open_run(tmp_path, *overrides)

    assert what_it_is(run) == {"pipeline": pipeline, "algorithm": run.config.algo.advantage.estimator}


async def test_a_cluster_that_cannot_be_looked_at_is_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.0)
    run = open_run(tmp_path, "logger.prometheus_port=0")
    complete(run, 0)
    looks = []

    class Blind:
        async def look(self):
            looks.append(1)
            raise ConnectionError("no cluster")

        def close(self):
            looks.append("closed")

    run.session.observer = Blind

    async with watched(run):
        while len(looks) < 2:
            await asyncio.sleep(0.05)
        assert watch.target_file("run").exists()

    assert looks[-1] == "closed"
    assert caplog.text.count("cannot be looked at: ConnectionError: no cluster") == 1
    assert not watch.target_file("run").exists()


async def test_an_address_that_this_machine_has_not_is_a_warning(tmp_path, caplog):
    run = open_run(tmp_path, "logger.prometheus_port=0", "logger.prometheus_host=203.0.113.1")

    async with watched(run):
        pass

    assert "nobody can watch the run" in caplog.text
