"""Calls of the rollout worker that meet on the same engines: what goes on, what ends, and who drops whose requests.

An engine holds the answers to the requests of a group until the group is let go. Each group has one sample.
"""

import asyncio
import uuid
from types import SimpleNamespace

import pytest
from cluster_samples import FakeEngine, Method
from minimal_config import config
from ray.exceptions import RayActorError

from rlhf_core.agents import SingleTurnAgentExecutor
from rlhf_core.agents.loading import Agent
from rlhf_core.cluster.rollout_worker import RolloutWorker
from rlhf_core.data import sample_seed
from rlhf_core.data.order import PromptOrder
from rlhf_core.errors import WorkerError
from rlhf_core.records import Draw, Generation, OpenGroup, Prompt, PromptCursor, StopReason, VersionSpan
from rlhf_core.storage import RunStore

G0, G1, G2, G3 = (f"0000-{number:08d}" for number in range(4))
EVAL = "eval-000000"


class Engine(FakeEngine):
    """Stamps the version that it speaks with when it answers."""

    def __init__(self, speaks_with=0):
        super().__init__(self._answer)
        self.speaks_with, self.dropped, self.dead = speaks_with, 0, False
        self._released, self._changed = set(), asyncio.Event()
        self.drop_requests, self.version = Method(self._drop), Method(self._version)

    def let_go(self, *groups):
        self._released |= set(groups)
        self._changed.set()

    def die(self):
        self.dead = True
        self._changed.set()

    @property
    def asked(self):
        """(group, seed) of each request that came."""
        return [(r.affinity, r.sampling.seed) for call in self.calls for r in call]

    async def _drop(self):
        self.dropped += 1

    async def _version(self):
        if self.dead:
            raise RayActorError
        return self.speaks_with

    async def _answer(self, requests):
        left = dict(enumerate(requests))
        while left:
            if self.dead:
                raise RayActorError
            if ready := [index for index, asked in left.items() if asked.affinity in self._released]:
                spans = [VersionSpan(0, 1, self.speaks_with)]
                yield [(i, Generation(left.pop(i).request_id, [5], [-0.5], spans, StopReason.EOS)) for i in ready]
            self._changed.clear()
            await self._changed.wait()


@pytest.fixture
async def worker():
    """Of a run of eight prompts, and one to evaluate with."""
    root = f"memory://{uuid.uuid4().hex}"
    alone = ("rollout.n_samples_per_prompt=1", "rollout.publish_groups=1", "algo.advantage.estimator=reinforce")
    checked = config(f"storage.root={root}", *alone)
    context = SimpleNamespace(run_id="run", config=checked, store=RunStore("run", root), enter=lambda worker: None)
    worker = RolloutWorker(context)
    worker._agent = Agent(SingleTurnAgentExecutor(), "one turn")
    worker._tokenizer, worker._images = SimpleNamespace(decode=lambda ids, **_: "A"), None
    worker._end_ids = frozenset()
    worker._prompts = [Prompt(f"row-{i}", "sums", f"{i} =", [11, 12]) for i in range(8)]
    worker._held_out = [Prompt("held-out", "sums", "9 =", [11, 12])]
    worker._order = PromptOrder([8], seed=3)
    yield worker
    await worker.shutdown()


def draw(iteration=0, prompts=0, cursor=0, **fields):
    return Draw(iteration, max(0, iteration - 2), PromptCursor(0, cursor), prompts, **fields)


async def soon(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


def rows_of(worker, outcome):
    return sorted(worker._store.read_trajectories(outcome.parts), key=lambda row: row.key)


def seed_in(worker, iteration, group_id):
    row = worker._order.epoch(0)[PromptCursor.of_group(group_id).offset]
    return sample_seed(worker._config.train.seed, iteration, f"row-{row}", 0)


# --- a rollout and an evaluation


async def test_an_evaluation_leaves_the_requests_of_a_rollout_alone_and_the_other_way_round(worker):
    engine = Engine()
    rollout = asyncio.create_task(worker.rollout(draw(prompts=2), [engine]))
    evaluation = asyncio.create_task(worker.evaluate(0, [engine]))
    await soon(lambda: len(engine.asked) == 3)

    engine.let_go(EVAL)
    await evaluation
    assert not rollout.done()
    engine.let_go(G0, G1)
    await rollout

    assert (engine.dropped, engine.aborted) == (1, [])


async def test_engines_drop_what_an_earlier_process_asked_and_only_once(worker):
    engines = [Engine(), Engine()]
    for engine in engines:
        engine.let_go(G0, G1, EVAL)

    await worker.rollout(draw(prompts=1), engines)
    await worker.evaluate(0, engines)
    await worker.rollout(draw(1, prompts=1, cursor=1), engines)

    assert [engine.dropped for engine in engines] == [1, 1]


async def test_a_rollout_that_ends_early_takes_back_its_own_requests_only(worker):
    engine = Engine()
    rollout = asyncio.create_task(worker.rollout(draw(prompts=2), [engine]))
    evaluation = asyncio.create_task(worker.evaluate(0, [engine]))
    await soon(lambda: len(engine.asked) == 3)

    rollout.cancel()
    await asyncio.wait([rollout])
    await soon(lambda: engine.aborted)

    assert sorted(engine.aborted[0]) == [f"0-0-{G0}-0", f"0-0-{G1}-0"]
    engine.let_go(EVAL)
    await evaluation


async def test_a_call_that_its_caller_has_given_up_on_ends_when_the_next_one_comes(worker):
    """Ray does not cancel a call whose caller is gone."""
    engine = Engine()
    given_up = asyncio.create_task(worker.rollout(draw(prompts=2), [engine]))
    await soon(lambda: len(engine.asked) == 2)

    again = asyncio.create_task(worker.rollout(draw(prompts=2), [engine]))
    await soon(lambda: len(engine.asked) == 4)
    engine.let_go(G0, G1)
    outcome = await again

    assert given_up.cancelled()
    assert sorted(engine.aborted[0]) == [f"0-0-{G0}-0", f"0-0-{G1}-0"]
    assert len(rows_of(worker, outcome)) == 2


# --- from draw to draw


async def test_what_is_unfinished_goes_on_and_lies_where_the_draw_that_finished_it_says(worker):
    engine = Engine()
    engine.let_go(G0)
    first = await worker.rollout(draw(prompts=2, wanted=1), [engine])
    engine.speaks_with = 1
    engine.let_go(G1, G2)

    second = await worker.rollout(
        draw(1, prompts=1, cursor=2, round=4, unfinished=first.unfinished, wanted=2), [engine]
    )

    assert first.unfinished == (OpenGroup(G1, 0),)
    assert [(row.group_id, row.iteration, row.round) for row in rows_of(worker, second)] == [(G1, 1, 4), (G2, 1, 4)]
    assert set(second.places.values()) == {part.path for part in second.parts}
    assert (second.drawn, second.unfinished, second.tally.samples) == (1, (), 2)
    seeds = [(G0, seed_in(worker, 0, G0)), (G1, seed_in(worker, 0, G1)), (G2, seed_in(worker, 1, G2))]
    assert engine.asked == seeds, "G1 is asked for once, with the seed of the iteration that began it"


async def test_what_is_too_old_is_begun_anew(worker):
    engine = Engine()
    engine.let_go(G0)
    await worker.rollout(draw(prompts=2, wanted=1), [engine])
    engine.speaks_with = 3

    finishing = asyncio.create_task(worker.rollout(draw(3, cursor=2, again=(G1,), wanted=0), [engine]))
    await soon(lambda: len(engine.asked) == 3)
    engine.let_go(G1)
    outcome = await finishing

    assert engine.aborted == [[f"0-0-{G1}-0"]]
    assert engine.asked[-1] == (G1, seed_in(worker, 3, G1))
    assert outcome.oldest_versions == {G1: 3}
    assert (outcome.drawn, outcome.cursor) == (0, PromptCursor(0, 2))


async def test_a_draw_that_is_asked_for_again_goes_on_with_what_it_began(worker):
    """Its round was not recorded: what is published is found, what runs goes on, a group begun anew by it too."""
    engine = Engine(speaks_with=3)
    engine.let_go(G0)
    asked = draw(3, prompts=2, cursor=2, again=(G0,), unfinished=(OpenGroup(G1, 2),), wanted=1)
    await worker.rollout(asked, [engine])

    engine.let_go(G1, G2, G3)
    outcome = await worker.rollout(asked, [engine])

    assert sorted(group for group, _ in engine.asked) == [G0, G1, G2, G3]
    assert (outcome.resumed_groups, len(outcome.unfinished)) == (1, 3)


async def test_groups_end_with_the_engine_that_was_made_anew_and_begin_again(worker):
    old, other, new = Engine(), Engine(), Engine(speaks_with=1)
    old.let_go(G0)
    other.let_go(G0)
    first = await worker.rollout(draw(prompts=3, wanted=1), [old, other])
    assert {group.group_id for group in first.unfinished} == {G1, G2}

    asked = draw(1, cursor=3, unfinished=first.unfinished, wanted=2)
    finishing = asyncio.create_task(worker.rollout(asked, [new, other]))
    await soon(lambda: sum(len(engine.asked) for engine in (old, other, new)) == 5)
    for engine in (other, new):
        engine.let_go(G1, G2)
    second = await finishing

    assert [row.group_id for row in rows_of(worker, second)] == [G1, G2]
    assert (old.dropped, other.dropped, new.dropped) == (1, 1, 1)
    begun = [group for engine in (new, other) for group, seed in engine.asked if seed == seed_in(worker, 1, group)]
    assert sorted(begun) == [G1, G2]


async def test_an_engine_that_dies_ends_the_rollout_and_leaves_nothing_in_play(worker):
    dying, healthy = Engine(), Engine()
    rollout = asyncio.create_task(worker.rollout(draw(prompts=4), [dying, healthy]))
    await soon(lambda: len(dying.asked) + len(healthy.asked) == 4)

    dying.die()
    with pytest.raises(WorkerError, match="an engine died while generating"):
        await rollout
    await soon(lambda: healthy.aborted)

    assert worker._in_play.begun_in == {}
    assert len(healthy.aborted[0]) == len(healthy.asked) > 0


async def test_an_engine_that_is_too_old_for_a_draw_is_no_place_to_begin_at(worker):
    with pytest.raises(WorkerError, match=r"speak with versions \[0\], none of which may be older than 1"):
        await worker.rollout(draw(3, prompts=1, wanted=1), [Engine()])
