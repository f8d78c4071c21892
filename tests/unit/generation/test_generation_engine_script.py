"""The engine's own logic over a scripted AsyncLLM: batches, deadlines, and weight updates that go wrong."""

import asyncio
import dataclasses

import pytest
from scripted_llm import ScriptedLlm

from rlhf_core.errors import DeadlineError, GenerationError, WeightSyncError, WorkerError
from rlhf_core.generation import engine as engine_module
from rlhf_core.generation.engine import VllmEngine
from rlhf_core.generation.settings import EngineSettings
from rlhf_core.records import GenerateRequest, Generation, SamplingParams
from rlhf_core.weights import WeightUpdate

SETTINGS = EngineSettings(
    model="m", dtype="float32", max_model_len=64, max_num_seqs=8, device="cpu", sync_backend="shm", request_timeout=5
)
UPDATE = WeightUpdate(version=1, backend="shm", payload={"path": "p"})


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch):
    monkeypatch.setattr(engine_module, "to_sampling_params", lambda *_: None)
    monkeypatch.setattr(engine_module, "_request_errors", lambda: (ValueError,))


def engine_on(llm: ScriptedLlm, **settings) -> VllmEngine:
    engine = VllmEngine(dataclasses.replace(SETTINGS, **settings))
    engine._llm, engine._version = llm, 0
    return engine


def request(name="r", prompt=(1, 2, 3)) -> GenerateRequest:
    return GenerateRequest(name, list(prompt), SamplingParams(max_tokens=4), affinity="")


async def collect(engine, requests):
    return dict([pair async for chunk in engine.generate_many(requests) for pair in chunk])


async def test_every_request_comes_once_and_a_bad_one_fails_alone():
    requests = [request("a"), request("long", [1] * 64), request("odd", [666]), request("b")]

    outcomes = await collect(engine_on(ScriptedLlm()), requests)

    assert sorted(outcomes) == [0, 1, 2, 3]
    assert [type(outcomes[i]) for i in range(4)] == [Generation, GenerationError, GenerationError, Generation]
    assert "request long: a prompt of 64 tokens" in str(outcomes[1])
    assert "request odd: the engine refused it: token id 666" in str(outcomes[2])


async def test_a_batch_on_an_idle_engine_is_added_while_it_is_paused():
    llm = ScriptedLlm(silent=True)
    engine = engine_on(llm)

    first = asyncio.create_task(collect(engine, [request("a"), request("b")]))
    await asyncio.sleep(0)
    second = asyncio.create_task(collect(engine, [request("c")]))  # the engine is busy: it must not be paused
    await asyncio.sleep(0.01)
    for internal_id in list(llm.request_states):
        llm.finish(internal_id)
    await asyncio.gather(first, second)

    assert llm.calls == ["pause keep True", "add", "add", "resume", "add"]


async def test_later_turns_find_the_cache_of_the_earlier_ones():
    llm = ScriptedLlm()
    engine = engine_on(llm)

    for turns in ([True, True], [True, False]):
        requests = [dataclasses.replace(request(), continues=later) for later in turns]
        [chunk async for chunk in engine.generate_many(requests)]

    assert [call for call in llm.calls if call.startswith("pause")] == ["pause keep False", "pause keep True"]


async def test_generate_joins_without_pausing_and_raises_its_own_error():
    llm = ScriptedLlm()
    engine = engine_on(llm)

    assert (await engine.generate(request())).token_ids == [11, 2]
    with pytest.raises(GenerationError, match="empty"):
        await engine.generate(request(prompt=()))
    assert llm.calls == ["add"]


async def test_a_silent_engine_is_a_deadline_error_and_the_request_is_aborted_case_40():
    llm = ScriptedLlm(silent=True)

    with pytest.raises(DeadlineError, match=r"request r: the engine finished nothing for 0.01 s"):
        await engine_on(llm, request_timeout=0.01).generate(request())

    assert llm.aborted == ["1-0-internal"]


async def test_closing_the_stream_aborts_what_is_open():
    llm = ScriptedLlm(silent=True)
    engine = engine_on(llm)
    stream = engine.generate_many([request("a"), request("b")])
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.01)
    llm.finish("1-0-internal")

    [(index, _)] = await waiting
    await stream.aclose()

    assert index == 0
    assert llm.aborted == ["1-1-internal"]


async def test_a_dead_engine_is_a_worker_error_case_46():
    llm = ScriptedLlm(silent=True)
    engine = engine_on(llm)
    batch = asyncio.create_task(collect(engine, [request()]))
    await asyncio.sleep(0.01)

    llm.errored = True
    llm.propagate_error(RuntimeError("out of memory"))

    with pytest.raises(WorkerError, match="died while generating: out of memory"):
        await batch
    with pytest.raises(WorkerError, match="not running"):
        await engine.check_health()


async def test_an_update_goes_through_its_steps_in_order():
    llm = ScriptedLlm()
    engine = engine_on(llm)

    await engine.update_weights(UPDATE)

    steps = "start_weight_update update_weights finish_weight_update update_weight_version resume_generation"
    assert llm.calls == ["prepare_weight_update", "pause keep True", *steps.split()]
    assert engine.version == 1
    assert (await engine.generate(request())).version_spans == [(0, 2, 1)]


async def test_weights_that_are_not_whole_leave_the_old_ones_case_36():
    llm = ScriptedLlm()
    engine = engine_on(llm)
    llm.faults["prepare_weight_update"] = RuntimeError("checksum differs")

    with pytest.raises(WeightSyncError, match=r"failed at step 'prepare': checksum differs; .* keeps its old"):
        await engine.update_weights(UPDATE)

    assert llm.calls == ["prepare_weight_update"]
    assert (await engine.generate(request())).version_spans == [(0, 2, 0)]


async def test_a_failed_pause_is_undone_case_36():
    llm = ScriptedLlm()
    engine = engine_on(llm)
    llm.faults["pause keep True"] = RuntimeError("no")

    with pytest.raises(WeightSyncError, match="keeps its old weights"):
        await engine.update_weights(UPDATE)

    assert llm.calls[-1] == "resume_generation"
    await engine.check_health()


async def test_half_loaded_weights_never_speak_and_a_retry_works_case_36():
    llm = ScriptedLlm(silent=True)
    engine = engine_on(llm)
    in_flight = asyncio.create_task(engine.generate(request("early")))
    await asyncio.sleep(0.01)
    llm.faults["update_weights"] = RuntimeError("500: shape mismatch")

    with pytest.raises(WeightSyncError, match=r"step 'load': 500: shape mismatch; its weights are damaged"):
        await engine.update_weights(UPDATE)
    with pytest.raises(WorkerError, match="shape mismatch"):
        await in_flight
    with pytest.raises(WorkerError, match="shape mismatch"):
        await engine.generate(request("late"))
    assert set(llm.aborted) == {"1-0-internal"}
    assert llm.calls.index("abort") < llm.calls.index("resume_generation")

    llm.faults.clear()
    llm.silent = False
    await engine.update_weights(UPDATE)
    assert (await engine.generate(request("again"))).version_spans == [(0, 2, 1)]


async def test_an_engine_that_never_answers_is_a_deadline_error_and_a_retry_works_case_36():
    llm = ScriptedLlm()
    engine = engine_on(llm, sync_timeout=0.02)
    llm.faults["finish_weight_update"] = "hang"

    with pytest.raises(DeadlineError, match=r"step 'finish' within 0.02 s \(last step done: load\)"):
        await engine.update_weights(UPDATE)
    with pytest.raises(WorkerError, match="did not answer"):
        await engine.check_health()

    llm.faults.clear()
    await engine.update_weights(UPDATE)
    assert engine.version == 1
    await engine.check_health()


async def test_a_cancelled_update_leaves_the_engine_silent():
    """It stays paused: what is in flight would wait for good."""
    llm = ScriptedLlm(silent=True)
    engine = engine_on(llm)
    in_flight = asyncio.create_task(engine.generate(request("early")))
    await asyncio.sleep(0.01)
    llm.faults["update_weights"] = "hang"
    update = asyncio.create_task(engine.update_weights(UPDATE))
    await asyncio.sleep(0.01)

    update.cancel()
    await asyncio.wait([update])

    for task in (in_flight, engine.generate(request("late"))):
        with pytest.raises(WorkerError, match="version 1 was cut off"):
            await task
    assert llm.aborted == ["1-0-internal"]


async def test_an_engine_that_dies_while_its_weights_change_leaves_nobody_waiting_case_46():
    llm = ScriptedLlm(silent=True)
    engine = engine_on(llm)
    batch = asyncio.create_task(collect(engine, [request("a"), request("b")]))
    await asyncio.sleep(0.01)
    one = asyncio.create_task(engine.generate(request("c")))
    await asyncio.sleep(0.01)
    llm.faults["update_weights"] = "hang"
    update = asyncio.create_task(engine.update_weights(UPDATE))
    late = asyncio.create_task(engine.generate(request("d")))
    await asyncio.sleep(0.01)

    llm.errored = True

    with pytest.raises(WeightSyncError, match="died before it answered"):
        await update
    for task in (batch, one, late):
        with pytest.raises(WorkerError):
            await task


async def test_a_request_that_times_out_while_the_weights_change_is_dropped_and_the_update_goes_on():
    llm = ScriptedLlm(silent=True)
    engine = engine_on(llm, request_timeout=0.05)
    in_flight = asyncio.create_task(engine.generate(request()))
    await asyncio.sleep(0.01)
    llm.faults["update_weights"] = asyncio.Event()
    update = asyncio.create_task(engine.update_weights(UPDATE))

    with pytest.raises(DeadlineError):
        await in_flight
    assert llm.aborted == ["1-0-internal"]
    llm.faults["update_weights"].set()
    await update

    assert engine.version == 1


async def test_an_update_waits_for_a_batch_that_is_being_added_and_for_nothing_else():
    llm = ScriptedLlm(silent=True)
    engine = engine_on(llm)
    batch = asyncio.create_task(collect(engine, [request(str(index)) for index in range(50)]))
    await asyncio.sleep(0)
    update = asyncio.create_task(engine.update_weights(UPDATE))
    later = asyncio.create_task(collect(engine, [request("later")]))
    await update
    await asyncio.sleep(0.01)

    for internal_id in list(llm.request_states):
        llm.finish(internal_id)
    await asyncio.gather(batch, later)

    steps = [call for call in llm.calls if call != "add"]
    assert steps[:3] == ["pause keep True", "resume", "prepare_weight_update"]
    assert llm.calls.index("prepare_weight_update") > 50  # behind the whole batch
    assert llm.calls[-1] == "add"  # and the busy engine is not paused for what comes after the update


async def test_an_engine_that_does_not_pause_for_a_batch_holds_up_nobody_case_40():
    """It lives, and does not answer: a weight update would wait for the batch."""
    llm = ScriptedLlm()
    engine = engine_on(llm, sync_timeout=0.02)
    llm.faults = {"pause keep True": "hang", "prepare_weight_update": "hang"}

    with pytest.raises(WorkerError, match=r"did not pause within 0.02 s"):
        await collect(engine, [request()])
    with pytest.raises(WorkerError, match=r"did not pause within 0.02 s"):
        await engine.check_health()
    with pytest.raises(DeadlineError, match="step 'prepare'"):
        await engine.update_weights(UPDATE)


async def test_requests_wait_for_an_update_and_speak_with_the_new_version():
    llm = ScriptedLlm()
    engine = engine_on(llm)
    update = asyncio.create_task(engine.update_weights(UPDATE))
    await asyncio.sleep(0)

    generation = await engine.generate(request())

    assert update.done()
    assert generation.version_spans == [(0, 2, 1)]


async def test_an_engine_that_was_never_started_says_so():
    with pytest.raises(WorkerError, match="never started"):
        await VllmEngine(SETTINGS).generate(request())
