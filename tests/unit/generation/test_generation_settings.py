"""From the configuration to vLLM's arguments and environment."""

import dataclasses

import pytest

from rlhf_core.config import parse_config
from rlhf_core.errors import ConfigError, GenerationError
from rlhf_core.generation.sampling import token_budget
from rlhf_core.generation.settings import IMAGES_OF_AN_EPISODE, EngineSettings, engine_environment
from rlhf_core.records import GenerateRequest, SamplingParams

BASE = {
    "actor": {"model_name_or_path": "builtin:tiny"},
    "data": {"prompt_dataset": "a.jsonl", "max_len": 2048},
    "reward": {"functions": [{"use": "digits"}]},
}


def settings(device="cpu", **vllm) -> EngineSettings:
    turns = {"colocate_all": vllm.get("sync_backend") == "ipc"}
    return EngineSettings.from_config(parse_config({**BASE, "vllm": vllm, "train": turns}), "some/model", device)


def test_settings_follow_the_configuration():
    made = settings(dtype="auto", max_num_seqs=64, cpu_kv_cache_gib=0.5, sync_timeout=7)

    assert (made.model, made.dtype, made.max_model_len) == ("some/model", "bfloat16", 2048)
    assert (made.max_num_seqs, made.sync_timeout, made.sync_backend) == (64, 7, "shm")
    assert settings(dtype="fp32").dtype == "float32"


def test_threads_are_as_many_as_the_run_says(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    asked = EngineSettings.from_config(parse_config({**BASE, "run": {"cpu_threads": 5}}), "some/model", "cpu")

    assert asked.cpu_threads == 5
    assert settings().cpu_threads == 7
    assert settings(num_engines=2).cpu_threads == 3


@pytest.mark.parametrize(
    ("chosen", "device", "backend"),
    [("auto", "cpu", "shm"), ("auto", "gpu", "nccl"), ("ipc", "gpu", "ipc"), ("shm", "cpu", "shm")],
)
def test_sync_backend(chosen, device, backend):
    assert settings(device, sync_backend=chosen).sync_backend == backend


@pytest.mark.parametrize(("chosen", "device"), [("nccl", "cpu"), ("ipc", "cpu"), ("shm", "gpu")])
def test_a_backend_of_the_other_device_is_refused(chosen, device):
    with pytest.raises(ConfigError, match=f"vllm.sync_backend='{chosen}' does not work on {device}"):
        settings(device, sync_backend=chosen)


def test_a_prompt_fits_into_one_step_on_cpu():
    """Seeds and chunked prefill together kill vLLM's CPU engine."""
    short = dataclasses.replace(settings(), max_model_len=512).engine_arguments()
    long = dataclasses.replace(settings(), max_model_len=9000).engine_arguments()

    assert not short["enable_chunked_prefill"]
    assert short["max_num_batched_tokens"] >= 512
    assert long["max_num_batched_tokens"] >= 9000


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_only_an_engine_that_keeps_kv_caches_has_another_scheduler(device):
    partial = {"async_enable": True, "partial_rollout_enable": True}
    made = [
        EngineSettings.from_config(parse_config({**BASE, "train": {**partial, **kv}}), "some/model", device)
        for kv in ({}, {"partial_rollout_kv": "keep"})
    ]

    assert [settings.partial_rollout_kv for settings in made] == ["recompute", "keep"]
    recompute, keep = (settings.engine_arguments() for settings in made)
    assert keep.pop("scheduler_cls").startswith("rlhf_core.generation.kept_kv.")
    assert keep == recompute


@pytest.mark.parametrize(
    ("gpus", "shares", "backend"), [(1, False, "uni"), (1, True, "uni"), (2, False, "mp"), (2, True, "ray")]
)
def test_who_starts_the_workers_of_an_engine(gpus, shares, backend):
    """Named in every case: in a placement group vLLM would choose Ray, which takes bundles of one GPU only."""
    actor = {**BASE["actor"], "num_gpus_per_node": gpus}
    tree = {**BASE, "actor": actor, "vllm": {"tensor_parallel_size": gpus}, "train": {"colocate_all": shares}}

    arguments = EngineSettings.from_config(parse_config(tree), "some/model", "gpu").engine_arguments()

    assert arguments["distributed_executor_backend"] == backend


def test_gpu_engines_keep_vllms_defaults():
    arguments = settings("gpu", gpu_memory_utilization=0.4).engine_arguments()

    assert arguments["gpu_memory_utilization"] == 0.4
    assert not arguments.keys() & {"block_size", "enable_chunked_prefill", "kv_cache_memory_bytes"}
    assert arguments["logprobs_mode"] == "processed_logprobs"


def test_environment():
    cpu = engine_environment(dataclasses.replace(settings(), cpu_threads=3))
    two = engine_environment(dataclasses.replace(settings(), tensor_parallel_size=2))

    assert cpu["OMP_NUM_THREADS"] == "3"
    assert cpu["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in two
    assert "OMP_NUM_THREADS" not in engine_environment(settings("gpu"))
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" in engine_environment(settings("gpu", sync_backend="ipc"))
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in engine_environment(settings("gpu"))


@pytest.mark.parametrize(("prompt", "max_tokens", "budget"), [(3, 8, 8), (12, 8, 8), (13, 8, 7), (19, 8, 1)])
def test_the_context_clips_the_answer(prompt, max_tokens, budget):
    request = GenerateRequest("r", [1] * prompt, SamplingParams(max_tokens=max_tokens), affinity="")

    assert token_budget(request, max_model_len=20) == budget


@pytest.mark.parametrize("prompt", [0, 20, 21])
def test_an_impossible_prompt_is_refused(prompt):
    request = GenerateRequest("r", [1] * prompt, SamplingParams(max_tokens=1), affinity="")

    with pytest.raises(GenerationError, match=r"request r: .*prompt"):
        token_budget(request, max_model_len=20)


@pytest.mark.agents
def test_the_images_of_a_prompt_are_bounded_and_those_of_an_episode_only_by_vllm():
    def of(images, *overrides):
        data = {**BASE["data"], "max_images_per_prompt": images}
        return EngineSettings.from_config(parse_config({**BASE, "data": data}, overrides), "some/model", "cpu")

    assert "limit_mm_per_prompt" not in of(0).engine_arguments()
    assert of(2).engine_arguments()["limit_mm_per_prompt"] == {"image": 2, "video": 0}
    assert of(2, "train.agent_func_path=agent.py").max_images == IMAGES_OF_AN_EPISODE
    assert of(0, "train.agent_func_path=agent.py").max_images == 0
