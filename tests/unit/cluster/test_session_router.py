"""From episodes to the servers of the engines: where a session lives, and what becomes of it when an engine dies."""

import asyncio

import pytest
from cluster_samples import Method
from ray.exceptions import RayActorError

from rlhf_core.cluster import session_router as router_module
from rlhf_core.cluster.session_router import SessionRouter
from rlhf_core.errors import GenerationError, WorkerError
from rlhf_core.records import SamplingParams, Session, SessionRecord, SessionRequest

pytestmark = pytest.mark.agents


class Engine:
    """An engine actor: its sessions, and what was asked."""

    def __init__(self):
        self.open, self.closed, self.posted, self.questions = [], [], asyncio.Event(), []
        self.rewarded, self.dead, self.silent = set(), False, False

    def __getattr__(self, name):
        do = object.__getattribute__(self, f"do_{name}")

        async def call(*arguments):
            if self.dead:
                raise RayActorError()
            if self.silent:
                await asyncio.sleep(3600)
            return await do(*arguments)

        return Method(call)

    async def do_open_session(self, request):
        if request.session_id == "refused":
            raise GenerationError("no such luck")
        self.open.append(request.session_id)
        return Session(request.session_id, "http://here/v1", "key")

    async def do_close_session(self, session_id):
        self.closed.append(session_id)
        return SessionRecord(session_id, ())

    async def do_rewards_posted(self, session_ids, seconds):
        self.questions.append(sorted(session_ids))
        for _ in range(100):
            if found := self.rewarded & set(session_ids):
                return sorted(found)
            await asyncio.sleep(seconds / 100)
            if self.dead:
                raise RayActorError()
        return []


def request(name, group="g0"):
    return SessionRequest(name, SamplingParams(max_tokens=4), 8, 64, 4, affinity=group)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(router_module, "ASK_SECONDS", 0.05)
    monkeypatch.setattr(router_module, "TIDY_SECONDS", 0.1)


async def test_a_group_lives_on_one_engine_while_the_load_is_balanced():
    engines = [Engine(), Engine()]
    router = SessionRouter(engines, slack=4)

    for group in ("g0", "g1"):
        for sample in range(4):
            await router.open_session(request(f"{group}-{sample}", group))

    assert [[name[:2] for name in engine.open] for engine in engines] == [["g0"] * 4, ["g1"] * 4]


async def test_a_large_group_spills_over_to_the_idlest_engine():
    engines = [Engine(), Engine()]
    router = SessionRouter(engines, slack=4)

    for sample in range(20):
        await router.open_session(request(f"s{sample}"))

    assert [len(engine.open) for engine in engines] == [12, 8]


async def test_closed_sessions_make_room():
    engines = [Engine(), Engine()]
    router = SessionRouter(engines, slack=1)
    for name in ("a", "b"):
        await router.open_session(request(name))

    await router.close_session("a")
    await router.open_session(request("c"))

    assert engines[0].open == ["a", "c"]


async def test_a_session_is_closed_where_it_lives_and_twice_if_asked():
    engines = [Engine(), Engine()]
    router = SessionRouter(engines)
    await router.open_session(request("a", "g0"))
    await router.open_session(request("b", "g1"))

    first, again = await router.close_session("b"), await router.close_session("b")

    assert (first, engines[0].closed, engines[1].closed) == (again, [], ["b", "b"])


async def test_a_dead_engine_is_a_worker_error():
    engine = Engine()
    router = SessionRouter([engine])
    await router.open_session(request("a"))
    engine.dead = True

    with pytest.raises(WorkerError, match="closing session a"):
        await router.close_session("a")
    with pytest.raises(WorkerError, match="opening session b"):
        await router.open_session(request("b"))


async def test_an_engine_that_hangs_is_one_too(monkeypatch):
    monkeypatch.setattr(router_module, "OPEN_SECONDS", 0.05)
    engine = Engine()
    engine.silent = True

    with pytest.raises(WorkerError, match=r"opening session a: no answer within 0\.05 s: the engine hangs"):
        await SessionRouter([engine]).open_session(request("a"))


async def test_a_session_that_was_not_opened_takes_no_room():
    engine = Engine()
    router = SessionRouter([engine])
    await router.open_session(request("a"))

    with pytest.raises(GenerationError):
        await router.open_session(request("refused"))
    await router.close()

    assert engine.closed == ["a"]


async def test_posted_rewards_are_asked_for_together():
    engine = Engine()
    router = SessionRouter([engine])
    names = [f"s{i}" for i in range(50)]
    for name in names:
        await router.open_session(request(name))

    waiting = [asyncio.create_task(router.reward_posted(name, 20)) for name in names]
    await asyncio.sleep(0.1)
    engine.rewarded = set(names)

    assert await asyncio.gather(*waiting) == [True] * 50
    assert len(engine.questions) < 40
    assert len(engine.questions[-1]) == 50


async def test_a_reward_that_never_comes():
    router = SessionRouter([Engine()])
    await router.open_session(request("a"))

    assert await router.reward_posted("a", 0.1) is False


async def test_whoever_waits_for_a_reward_hears_that_the_engine_died():
    engine = Engine()
    router = SessionRouter([engine])
    await router.open_session(request("a"))
    waiting = asyncio.create_task(router.reward_posted("a", 20))
    await asyncio.sleep(0.02)
    engine.dead = True

    with pytest.raises(WorkerError, match="an engine is gone"):
        await waiting


async def test_close_ends_what_is_open_and_waits_for_no_engine_that_hangs():
    fine, hangs = Engine(), Engine()
    router = SessionRouter([fine, hangs])
    await router.open_session(request("a", "g0"))
    await router.open_session(request("b", "g1"))
    hangs.silent = True

    async with asyncio.timeout(5):
        await router.close()

    assert (fine.closed, hangs.closed) == (["a"], [])


async def test_sessions_that_are_over_are_forgotten_in_the_end(monkeypatch):
    """But for those still open, however old."""
    monkeypatch.setattr(router_module, "MOST_HOMES", 4)
    router = SessionRouter([Engine()])
    await router.open_session(request("old"))

    for number in range(12):
        await router.open_session(request(f"s{number}", f"g{number}"))
        await router.close_session(f"s{number}")

    assert len(router._home_of) <= 5
    assert len(router._home_of_group) <= 4
    assert (await router.close_session("old")).session_id == "old"
