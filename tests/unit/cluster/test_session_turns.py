"""A run whose models share their GPUs: where each of them is while another computes. Actors follow a script."""

import asyncio

import pytest
from session_rig import Run

from rlhf_core.cluster.session import RunSession

SHARED = ["train.colocate_all=true", "vllm.enable_sleep=true", "ds.enable_sleep=true"]
ENGINES, MODELS = ("engine-0", "engine-1"), ("policy-0", "critic-0", "reference-0", "reward-0", "reward-1")


class SharedRun(Run):
    """Where everybody is, in one word or one a role."""

    def where(self):
        awake = {self[name].awake for name in ENGINES}
        there = {name.rpartition("-")[0]: self[name].there for name in MODELS}
        return ("awake" if awake == {True} else "asleep" if awake == {False} else "both", there)


GENERATING = ("awake", {"policy": "nothing", "critic": "nothing", "reference": "nothing", "reward": "nothing"})
TRAINING = ("asleep", {"policy": "all", "critic": "all", "reference": "all", "reward": "nothing"})
SCORING = ("asleep", {"policy": "nothing", "critic": "nothing", "reference": "nothing", "reward": "all"})


@pytest.fixture
async def run():
    opened = await SharedRun(2, *SHARED).open()
    yield opened
    await opened.session.close(keep_actors=True)


async def nothing():
    pass


async def test_engines_are_started_first_and_sleep_before_a_model_is_loaded(run):
    moves = [(role, method) for role, _, method in run.groups.calls if method in ("start", "sleep")]

    first_rank = min(moves.index((role, "start")) for role in ("policy", "critic", "reference", "reward"))
    assert max(place for place, move in enumerate(moves) if move == ("engine", "start")) < first_rank
    assert moves.index(("engine", "sleep")) < first_rank
    assert run.where() == TRAINING


async def test_a_whole_iteration_takes_turns(run, monkeypatch):
    session, seen = run.session, {}

    async def look(stage):
        seen[stage] = run.where()

    await session.heal(2, lambda: look("checkpoint"))
    await session.with_engines(2, 2, lambda: look("rollout"))
    run["scoring"].said = {"eval/failed": 0}, [], []
    monkeypatch.setattr(
        type(run["scoring"]), "do_judge", lambda worker, *_: (seen.update(scoring=run.where()), worker.said)[1]
    )
    await session.with_scoring(lambda: session.judge(2, ()))
    await session.heal(2, lambda: look("update"))

    assert seen == {"checkpoint": TRAINING, "rollout": GENERATING, "scoring": SCORING, "update": TRAINING}


@pytest.mark.parametrize("level", [1, 2])
async def test_a_sync_needs_no_more_than_the_parameters(run, monkeypatch, level):
    """With level 2 the engines have no version until it is done, whichever they had."""
    send, during = type(run["policy-0"]).do_sync, []
    monkeypatch.setattr(type(run["policy-0"]), "do_sync", lambda *a: (during.append(run.where()), send(*a))[1])
    for name in ENGINES:
        run[name].level = level
    await run.session.with_engines(2, 2, nothing)
    await run.session.heal(2, nothing)
    await run.session.with_engines(2, 2, nothing)

    parameters = ("asleep", GENERATING[1] | {"policy": "parameters"})
    assert during == [parameters] * level  # at first they lag behind; after that only those of level 2 need weights
    assert run.where() == GENERATING
    assert {run[name].held for name in ENGINES} == {2}


async def test_an_engine_that_died_is_made_again_while_nothing_else_is_there(run, monkeypatch):
    await run.session.with_engines(2, 2, nothing)
    await run.session.heal(2, nothing)
    start, during = type(run["engine-1"]).do_start, []
    monkeypatch.setattr(
        type(run["engine-1"]), "do_start", lambda engine: (during.append(run.where()[1]), start(engine))[1]
    )
    run["engine-1"].dead = True

    await run.session.with_engines(2, 2, nothing)

    assert during == [GENERATING[1]]
    assert run.where() == GENERATING


async def test_a_rank_that_died_is_restored_while_engines_sleep(run):
    await run.session.with_engines(2, 2, nothing)
    run["policy-0"].dead = True

    await run.session.heal(2, nothing)

    assert run.groups.made.count("policy-0") == 2
    assert run.where() == TRAINING


async def test_the_next_controller_finds_everybody_wherever_the_last_one_left_them(run):
    await run.session.with_engines(2, 2, nothing)
    left = run.session
    run.session = RunSession(left.context, run.groups, run.lease)

    await run.open()
    opened = run.where()
    await run.session.with_engines(2, 2, nothing)

    assert (opened, run.where()) == (TRAINING, GENERATING)
    await left.close(keep_actors=True)


async def test_a_checkpoint_waits_for_the_engines_to_finish(run):
    order = []

    async def generate():
        await asyncio.sleep(0.05)
        order.append(("rollout", run.where()[0]))

    async def save():
        order.append(("checkpoint", run.where()[0]))

    await asyncio.gather(run.session.with_engines(2, 2, generate), run.session.heal(2, save))

    assert order == [("rollout", "awake"), ("checkpoint", "asleep")]
