"""An engine that sleeps, over a scripted AsyncLLM: what vLLM is told, and what the engine says meanwhile."""

import asyncio
import dataclasses

import pytest
from scripted_llm import ScriptedLlm

from rlhf_core.config import parse_config
from rlhf_core.errors import WeightSyncError, WorkerError
from rlhf_core.generation import engine as engine_module
from rlhf_core.generation.engine import VllmEngine
from rlhf_core.generation.settings import EngineSettings
from rlhf_core.generation.sleeping import NO_WEIGHTS
from rlhf_core.records import GenerateRequest, SamplingParams
from rlhf_core.weights import WeightUpdate

SETTINGS = EngineSettings(
    model="m", dtype="float32", max_model_len=64, max_num_seqs=8, device="gpu", sync_backend="ipc", sleep_level=1
)
UPDATE = WeightUpdate(version=1, backend="ipc", payload={"names": []})
REQUEST = GenerateRequest("r", [1, 2, 3], SamplingParams(max_tokens=4), affinity="")


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch):
    monkeypatch.setattr(engine_module, "to_sampling_params", lambda *_: None)


@pytest.fixture
def llm():
    return ScriptedLlm()


def engine_on(llm, **settings) -> VllmEngine:
    engine = VllmEngine(dataclasses.replace(SETTINGS, **settings))
    engine._llm, engine._version = llm, 0
    return engine


async def test_a_sleeping_engine_refuses_says_its_version_and_wakes_up(llm):
    engine = engine_on(llm)

    await engine.sleep()
    with pytest.raises(WorkerError, match=r"asleep \(weights and kv_cache away\): wake it up"):
        await engine.generate(REQUEST)
    with pytest.raises(WorkerError, match="asleep"):
        await anext(engine.stream("prompt", None, "name", lambda: None))
    asleep_at = engine.version
    await engine.wake_up()
    generation = await engine.generate(REQUEST)

    assert asleep_at == 0
    assert generation.token_ids == [11, 2]
    assert llm.calls == ["sleep 1", "wake_up weights kv_cache", "add"]


async def test_who_is_asleep_or_awake_already_stays_so(llm):
    engine = engine_on(llm)

    for turn in (engine.wake_up, engine.sleep, engine.sleep, engine.wake_up, engine.wake_up):
        await turn()

    assert llm.calls == ["sleep 1", "wake_up weights kv_cache"]


async def test_new_weights_wake_only_the_memory_of_the_weights(llm):
    engine = engine_on(llm)
    await engine.sleep()
    llm.calls.clear()

    await engine.update_weights(UPDATE)
    with pytest.raises(WorkerError, match=r"asleep \(kv_cache away\)"):
        await engine.generate(REQUEST)
    await engine.wake_up()

    update = ["start_weight_update", "update_weights", "finish_weight_update", "update_weight_version"]
    assert llm.calls == ["wake_up weights", *update, "wake_up kv_cache"]
    assert engine.version == 1


async def test_after_a_weight_update_it_gives_both_back_again(llm):
    engine = engine_on(llm)
    await engine.sleep()
    await engine.update_weights(UPDATE)
    llm.calls.clear()

    await engine.sleep()
    await engine.wake_up()

    assert llm.calls == ["sleep 1", "wake_up weights kv_cache"]


async def test_level_2_has_no_version_and_does_not_speak_until_weights_come(llm):
    engine = engine_on(llm, sleep_level=2)

    await engine.sleep()
    assert engine.version == NO_WEIGHTS
    await engine.wake_up()
    with pytest.raises(WorkerError, match="weights went in its sleep"):
        await engine.generate(REQUEST)
    await engine.update_weights(UPDATE)
    await engine.generate(REQUEST)

    assert engine.version == 1


async def test_level_2_without_weights_lives(llm):
    engine = engine_on(llm, sleep_level=2)

    await engine.sleep()

    await engine.check_health()  # or the session would make it again


async def test_a_failed_update_leaves_level_2_without_a_version(llm):
    engine = engine_on(llm, sleep_level=2)
    await engine.sleep()
    llm.faults["update_weights"] = RuntimeError("handles are stale")

    with pytest.raises(WeightSyncError, match="failed at step 'load': handles are stale"):
        await engine.update_weights(UPDATE)

    assert engine.version == NO_WEIGHTS


async def test_requests_in_flight_keep_it_awake(llm):
    llm.silent = True
    engine = engine_on(llm)
    asking = asyncio.create_task(engine.generate(REQUEST))
    await asyncio.sleep(0)

    with pytest.raises(WorkerError, match="cannot sleep with 1 requests in flight"):
        await engine.sleep()
    asking.cancel()

    assert not [call for call in llm.calls if call.startswith("sleep")]


@pytest.mark.parametrize("call", ["sleep 1", "wake_up weights kv_cache"])
async def test_an_engine_that_fails_at_it_is_to_be_made_again(llm, call):
    engine = engine_on(llm)
    llm.faults[call] = RuntimeError("Memory usage increased after sleeping.")

    with pytest.raises(WorkerError, match="the engine did not (fall asleep|wake up): Memory usage increased"):
        await engine.sleep()
        await engine.wake_up()

    with pytest.raises(WorkerError, match="it did not"):
        await engine.check_health()


async def test_on_cpu_it_stops_scheduling_forgets_prefixes_and_says_so_once(llm, caplog):
    with caplog.at_level("INFO"):
        engine = engine_on(llm, device="cpu")
        for _ in range(2):
            await engine.sleep()
            await engine.update_weights(UPDATE)
            await engine.wake_up()

    update = ["start_weight_update", "update_weights", "finish_weight_update", "update_weight_version"]
    assert llm.calls == ["pause_generation", *update, "resume_generation"] * 2
    assert caplog.text.count("the engine keeps its memory") == 1


@pytest.mark.parametrize(
    ("overrides", "level"),
    [([], 0), (["vllm.enable_sleep=true"], 1), (["vllm.enable_sleep=true", "vllm.sleep_level=2"], 2)],
)
def test_gpu_engines_get_sleep_mode_where_it_is_asked_for(overrides, level):
    tree = {
        "actor": {"model_name_or_path": "m"},
        "data": {"prompt_dataset": "p.jsonl"},
        "reward": {"functions": [{"use": "digits"}]},
        "train": {"colocate_all": True},
    }
    settings = EngineSettings.from_config(parse_config(tree, overrides), "m", "gpu")

    assert settings.sleep_level == level
    assert settings.engine_arguments()["enable_sleep_mode"] is (level > 0)


def test_the_cpu_engine_would_refuse_sleep_mode_and_is_not_asked_for_it():
    assert "enable_sleep_mode" not in dataclasses.replace(SETTINGS, device="cpu", sync_backend="shm").engine_arguments()
