"""From executors to engines."""

import asyncio

import pytest
from cluster_samples import FakeEngine, Method, all_at_once, dies_after, generation, never, one_by_one, request
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError, WorkerCrashedError

from rlhf_core.cluster import router as router_module
from rlhf_core.cluster.router import AFFINITY_SLACK, EngineRouter
from rlhf_core.errors import DeadlineError, GenerationError, WorkerError


async def ask(router, *requests):
    return await asyncio.gather(*(router.generate(r) for r in requests), return_exceptions=True)


async def test_requests_of_one_tick_travel_in_one_call_in_order():
    engine = FakeEngine()

    answers = await ask(EngineRouter([engine], 1), *(request(f"r{i}") for i in range(5)))

    assert engine.names == [["r0", "r1", "r2", "r3", "r4"]]
    assert [a.request_id for a in answers] == ["r0", "r1", "r2", "r3", "r4"]


async def test_one_call_an_engine():
    first, second = FakeEngine(), FakeEngine()
    router = EngineRouter([first, second], 1)

    await ask(router, request("a", "g0"), request("b", "g1"), request("c", "g0"), request("d", "g1"))

    assert (first.names, second.names) == ([["a", "c"]], [["b", "d"]])


async def test_requests_of_the_next_tick_travel_at_once():
    """A conversation's second turn does not wait for the first turns of others."""
    engine = FakeEngine(one_by_one)
    router = EngineRouter([engine], 1)

    async def two_turns():
        await router.generate(request("turn-1"))
        return await router.generate(request("turn-2"))

    await asyncio.gather(two_turns(), router.generate(request("other")))

    assert engine.names == [["turn-1", "other"], ["turn-2"]]


async def test_answers_arrive_as_they_finish():
    async def last_first(requests):
        yield [(1, generation(requests[1]))]
        await asyncio.sleep(3600)

    router = EngineRouter([FakeEngine(last_first)], 60)
    slow = asyncio.create_task(router.generate(request("slow")))

    answer = await asyncio.wait_for(router.generate(request("quick")), 5)

    assert (answer.request_id, slow.done()) == ("quick", False)
    await router.close()


async def test_a_group_keeps_to_its_engine():
    engines = [FakeEngine(), FakeEngine()]
    router = EngineRouter(engines, 1)

    for i in range(6):
        await router.generate(request(f"r{i}", "g7"))

    assert sorted(len(engine.calls) for engine in engines) == [0, 6]


@pytest.mark.parametrize(("engines", "groups", "samples"), [(2, 4, 8), (4, 4, 8), (4, 16, 8), (3, 6, 4)])
async def test_groups_are_spread_evenly(engines, groups, samples):
    fakes = [FakeEngine() for _ in range(engines)]
    router = EngineRouter(fakes, 1)

    await ask(router, *(request(f"{g}-{s}", f"0000-{g:08d}") for g in range(groups) for s in range(samples)))

    assert [len(fake.calls[0]) for fake in fakes] == [groups * samples // engines] * engines


async def test_a_loaded_engine_spills_over():
    """One key for all: its engine takes AFFINITY_SLACK, then both are filled evenly."""
    engines = [FakeEngine(), FakeEngine()]

    await ask(EngineRouter(engines, 1), *(request(f"r{i}", "g0") for i in range(AFFINITY_SLACK + 10)))

    assert [len(engine.calls[0]) for engine in engines] == [AFFINITY_SLACK + 5, 5]


async def test_load_is_what_is_in_flight():
    engines = [FakeEngine(), FakeEngine()]
    router = EngineRouter(engines, 1)

    for i in range(AFFINITY_SLACK + 10):
        await router.generate(request(f"r{i}", "g0"))

    assert engines[1].calls == []


@pytest.mark.parametrize(
    "error",
    [
        RayActorError(),
        ActorUnavailableError("gone", None),
        WorkerCrashedError(),
        ObjectLostError("00", None, ""),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_an_engine_that_dies_mid_stream(error):
    router = EngineRouter([FakeEngine(dies_after(2, error))], 1)

    answers = await ask(router, *(request(f"r{i}") for i in range(4)))

    assert [a.request_id for a in answers[:2]] == ["r0", "r1"]
    assert [type(a) for a in answers[2:]] == [WorkerError, WorkerError]
    assert "an engine died while generating" in str(answers[2])


async def test_an_engine_dying_leaves_the_other_alone():
    engines = [FakeEngine(dies_after(0)), FakeEngine()]

    answers = await ask(EngineRouter(engines, 1), request("a", "g0"), request("b", "g1"))

    assert isinstance(answers[0], WorkerError)
    assert answers[1].request_id == "b"


async def test_a_failed_request_fails_alone():
    async def second_fails(requests):
        yield [(0, generation(requests[0])), (1, GenerationError("request r1: refused"))]
        yield [(2, generation(requests[2]))]

    answers = await ask(EngineRouter([FakeEngine(second_fails)], 1), *(request(f"r{i}") for i in range(3)))

    assert [type(a).__name__ for a in answers] == ["Generation", "GenerationError", "Generation"]


async def test_what_the_engine_raises_reaches_every_request():
    answers = await ask(
        EngineRouter([FakeEngine(dies_after(0, WorkerError("damaged weights")))], 1), request("a"), request("b")
    )

    assert [str(a) for a in answers] == ["damaged weights", "damaged weights"]


async def test_a_stream_that_ends_too_soon_is_an_error():
    async def forgets(requests):
        yield [(0, generation(requests[0]))]

    answers = await ask(EngineRouter([FakeEngine(forgets)], 1), request("a"), request("b"))

    assert isinstance(answers[1], WorkerError)
    assert "ended its stream without an answer" in str(answers[1])


async def test_a_silent_engine_is_given_up(monkeypatch):
    """CASE 40: no wait without a limit; the error names the setting."""
    monkeypatch.setattr(router_module, "GRACE_SECONDS", 0.0)
    router = EngineRouter([FakeEngine(never)], 0.05)

    with pytest.raises(DeadlineError, match=r"finished no request within 0.05 s \(vllm.request_timeout\)"):
        await router.generate(request("r7"))
    await router.close()


async def test_queueing_is_not_silence(monkeypatch):
    """Each answer takes less than the limit, all together take longer: none fails."""
    monkeypatch.setattr(router_module, "GRACE_SECONDS", 0.0)

    async def slow_but_steady(requests):
        for index, asked in enumerate(requests):
            await asyncio.sleep(0.06)
            yield [(index, generation(asked))]

    answers = await ask(EngineRouter([FakeEngine(slow_but_steady)], 0.15), *(request(f"r{i}") for i in range(5)))

    assert [a.request_id for a in answers] == [f"r{i}" for i in range(5)]


async def test_the_engines_own_limit_keeps_its_words():
    router = EngineRouter([FakeEngine(dies_after(0, DeadlineError("request r7: 5 s in the engine")))], 1)

    with pytest.raises(DeadlineError, match="5 s in the engine"):
        await router.generate(request("r7"))


async def test_a_late_answer_does_no_harm(monkeypatch):
    monkeypatch.setattr(router_module, "GRACE_SECONDS", 0.0)

    async def late(requests):
        await asyncio.sleep(0.1)
        yield [(i, generation(asked)) for i, asked in enumerate(requests)]

    router = EngineRouter([FakeEngine(late)], 0.05)
    with pytest.raises(DeadlineError):
        await router.generate(request("r0"))
    async with asyncio.timeout(5):
        while router._streams:
            await asyncio.sleep(0.01)

    assert [lane.in_flight for lane in router._lanes] == [0]


@pytest.mark.parametrize("ticks", [1, 2, 3, 5])
async def test_close_cancels_what_is_open(ticks):
    """However far the request has come: not yet flushed, stream made, stream running."""
    router = EngineRouter([FakeEngine(never)], 3600)
    waiting = asyncio.create_task(router.generate(request("r0")))
    for _ in range(ticks):
        await asyncio.sleep(0)

    await router.close()
    done, _ = await asyncio.wait([waiting], timeout=5)

    assert done
    assert waiting.cancelled()
    assert router._streams == set()


async def test_nothing_is_left_behind():
    router = EngineRouter([FakeEngine(all_at_once)], 1)

    await ask(router, request("a"), request("b"))
    await asyncio.sleep(0)

    assert router._streams == set()
    assert [lane.in_flight for lane in router._lanes] == [0]


# --- requests that nobody waits for


async def asked(router, *requests):
    """Tasks that wait for the answers, once the engines have the requests."""
    waiting = [asyncio.create_task(router.generate(r)) for r in requests]
    for _ in range(5):
        await asyncio.sleep(0)
    return waiting


async def test_who_is_cancelled_takes_its_request_back():
    engine = FakeEngine(never)
    router = EngineRouter([engine], 3600)
    waiting = await asked(router, *(request(f"r{i}") for i in range(4)))

    for task in waiting[:2]:
        task.cancel()
    await asyncio.wait(waiting[:2])
    await asyncio.sleep(0.01)

    assert engine.aborted == [["r0", "r1"]], "one call for a tick"
    assert [task.done() for task in waiting] == [True, True, False, False]
    await router.close()


async def test_an_engine_that_is_gone_is_not_mourned_by_those_who_left():
    engine = FakeEngine(never)
    router = EngineRouter([engine], 3600)

    async def dead(request_ids):
        raise RayActorError()

    engine.abort_requests = Method(dead)
    [waiting] = await asked(router, request("r0"))
    waiting.cancel()
    await asyncio.wait([waiting])

    await router.close()

    assert router._aborts == set()


async def test_close_takes_back_what_is_open():
    engine = FakeEngine(never)
    router = EngineRouter([engine], 3600)
    await asked(router, request("r0"), request("r1"))

    await router.close()

    assert engine.aborted == [["r0", "r1"]]


async def test_homes_are_forgotten_in_the_end(monkeypatch):
    monkeypatch.setattr(router_module, "MOST_HOMES", 3)
    router = EngineRouter([FakeEngine()], 1)

    for number in range(9):
        await router.generate(request("r", f"g{number}"))

    assert list(router._homes) == ["g6", "g7", "g8"]
