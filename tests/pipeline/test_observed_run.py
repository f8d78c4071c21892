"""A whole run that is watched: real Prefect server, Ray, vLLM, DeepSpeed; a real scrape, real event files, real wandb files."""

import asyncio
import json
import urllib.request
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flows.train import train
from rlhf_core.storage import RunStore
from tasks import watch
from tasks.lineage import iteration_metrics

pytestmark = [pytest.mark.pipeline, pytest.mark.stack, pytest.mark.timeout(600)]

ITERATIONS = 2
PROMPTS, SAMPLES, TOKENS = 8, 8, 96


@pytest.fixture(scope="module")
async def observed(prefect_api, ray_cluster, tmp_path_factory):
    """The run, and the largest value that each sample had in any scrape."""
    folder = tmp_path_factory.mktemp("observed")
    largest, of_run = defaultdict(float), set()

    def scrape(url):
        with urllib.request.urlopen(url, timeout=5) as answer:
            for family in text_string_to_metric_families(answer.read().decode()):
                for sample in family.samples:
                    labels = dict(sample.labels)
                    of_run.add(tuple(labels.pop(name) for name in ("run_id", "pipeline", "algorithm")))
                    found = (sample.name, *labels.values())
                    largest[found] = max(largest[found], sample.value)

    async def scrape_forever():
        while True:
            await asyncio.sleep(0.2)
            if watch.target_file("observed").exists():
                [target] = json.loads(watch.target_file("observed").read_text())
                await asyncio.to_thread(scrape, f"http://{target['targets'][0]}/metrics")

    overrides = [
        f"train.max_iterations={ITERATIONS}",
        f"rollout.batch_size={PROMPTS}",
        f"rollout.n_samples_per_prompt={SAMPLES}",
        f"rollout.max_new_tokens={TOKENS}",
        "train.micro_batch_size=8",
        "rollout.ignore_eos=true",
        "eval.dataset=configs/tasks/digits.py:prompts?count=2&seed=9",
        "run.cpu_threads=1",
        f"storage.root={folder / 'runs'}",
        "logger.prometheus_port=0",
        "logger.log_format=json",
        f"logger.tensorboard_dir={folder / 'curves'}",
        "logger.wandb.project=tests",
        "logger.wandb.mode=offline",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "LOOK_SECONDS", 0.5)
        patch.setenv("WANDB_DIR", str(folder))
        scraping = asyncio.create_task(scrape_forever())
        result = await train("configs/grpo_tiny_cpu.yaml", overrides, "observed")
        scraping.cancel()
    assert result["version"] == ITERATIONS
    return SimpleNamespace(
        largest=largest, of_run=of_run, folder=folder, store=RunStore("observed", str(folder / "runs"))
    )


def seen(observed, name, *labels):
    run = [found for found in observed.largest if found[0] == name and set(labels) <= set(found)]
    return max((observed.largest[found] for found in run), default=None)


async def test_what_prometheus_saw(observed):
    algorithm = observed.store.read_run()["config"]["algo"]["advantage"]["estimator"]
    assert observed.of_run == {("observed", "sync", algorithm)}
    for stage in ("rollout", "reward", "advantage", "update", "weight sync"):
        assert seen(observed, "rlhf_stage_seconds_count", stage) >= 1
    assert seen(observed, "rlhf_stage_active", "rollout") == 1
    assert seen(observed, "rlhf_iterations") >= 1
    assert seen(observed, "rlhf_rollout_tokens_total") >= PROMPTS * SAMPLES * TOKENS
    assert seen(observed, "rlhf_engine_requests_running", "engine-0") > 0
    assert 0 < seen(observed, "rlhf_engine_kv_cache_usage_ratio", "engine-0") <= 1
    assert seen(observed, "rlhf_engine_tokens_total", "engine-0") >= PROMPTS * SAMPLES * TOKENS
    assert seen(observed, "rlhf_groups_in_flight") > 0
    assert seen(observed, "rlhf_weight_sync_seconds_count") >= 1
    for process in ("controller", "engine-0", "policy-0", "rollout", "scoring"):
        assert seen(observed, "rlhf_process_resident_memory_bytes", process) > 50e6, process
    assert seen(observed, "rlhf_object_store_capacity_bytes") > 1e6


async def test_the_endpoint_ends_with_the_run(observed):
    assert not watch.target_file("observed").exists()


async def test_tensorboard_has_every_metric_of_every_iteration(observed):
    reader = EventAccumulator(str(observed.folder / "curves" / "observed"))
    reader.Reload()

    for iteration in range(ITERATIONS):
        for name, value in iteration_metrics(observed.store, iteration).items():
            points = {point.step: point.value for point in reader.Scalars(name)}
            assert points[iteration] == pytest.approx(value, rel=1e-5), name
    evaluations = observed.store.read_evaluation(ITERATIONS)["metrics"]
    assert [point.step for point in reader.Scalars("eval/score_mean")][-1] == ITERATIONS
    assert reader.Scalars("eval/score_mean")[-1].value == pytest.approx(evaluations["eval/score_mean"])


async def test_wandb_was_told_to_the_end(observed):
    told = json.loads((observed.folder / "wandb" / "observed.told.json").read_text())

    assert told == {"iterations": ITERATIONS, "evaluated": ITERATIONS}
    assert len(list(observed.folder.glob("wandb/offline-run-*/*.wandb"))) == 1


async def test_a_workers_line_says_stage_and_iteration(observed):
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    lines = [line for path in logs.glob("worker-*.err") for line in path.read_text().splitlines()]
    said = [json.loads(line) for line in lines if line.startswith('{"time"') and '"observed"' in line]

    places = [(line["worker"], line["stage"], line["iteration"]) for line in said if "trained on" in line["message"]]
    assert places == [("policy-0", "update", iteration) for iteration in range(ITERATIONS)]
