"""Who is on the GPUs in whose turn. Actors follow a script: each says in which order it was moved, and can be gone."""

import asyncio

import pytest
from minimal_config import config
from ray.exceptions import RayActorError

from rlhf_core.cluster.turns import Turns
from rlhf_core.errors import DeadlineError, WorkerError

COLOCATED = ["train.colocate_all=true", "vllm.enable_sleep=true", "ds.enable_sleep=true"]
NAMES = ("engine", "policy", "critic", "reward")


class Moved:
    """An actor that writes down how it is moved; a move takes as long as its script says."""

    def __init__(self, moves, name):
        self.moves, self.name = moves, name
        self.fault, self.seconds = None, 0.0

    def __getattr__(self, verb):
        return Remote(self, verb)


class Remote:
    def __init__(self, actor, verb):
        self.actor, self.verb = actor, verb

    async def remote(self, **named):
        await asyncio.sleep(self.actor.seconds)
        if self.actor.fault is not None:
            raise self.actor.fault
        self.actor.moves.append(" ".join([self.actor.name, self.verb, *named]))


class Rig:
    def __init__(self, *overrides, reward=True):
        self.moves = []
        self.actors = {name: Moved(self.moves, name) for name in NAMES}
        self.turns = Turns(
            config(*overrides),
            engines=lambda: [self.actors["engine"]],
            policy=lambda: [self.actors["policy"]],
            beside=lambda: [self.actors["critic"]],
            reward=lambda: [self.actors["reward"]] if reward else [],
        )

    async def moved(self, turn):
        self.moves.clear()
        await getattr(self.turns, turn)()
        return self.moves


@pytest.mark.parametrize(
    ("turn", "leave", "come"),
    [
        ("to_engines", ["policy offload", "critic offload", "reward offload"], ["engine wake_up"]),
        ("to_scoring", ["engine sleep", "policy offload", "critic offload"], ["reward reload"]),
        ("to_training", ["engine sleep", "reward offload"], ["policy reload", "critic reload"]),
        (
            "to_sync",
            ["engine sleep", "critic offload", "reward offload", "policy offload keep_parameters"],
            ["policy reload parameters_only"],
        ),
    ],
)
async def test_who_must_go_has_left_before_anybody_comes(turn, leave, come):
    rig = Rig(*COLOCATED)
    rig.actors["engine"].seconds = rig.actors["policy"].seconds = 0.01  # slower than the rest

    moves = await rig.moved(turn)

    assert sorted(moves[: len(leave)]) == sorted(leave)
    assert sorted(moves[len(leave) :]) == sorted(come)


@pytest.mark.parametrize("turn", ["to_engines", "to_scoring", "to_training", "to_sync"])
async def test_nothing_moves_without_the_keys(turn):
    assert await Rig().moved(turn) == []


@pytest.mark.parametrize(
    ("key", "actors"), [("vllm.enable_sleep", {"engine"}), ("ds.enable_sleep", {*NAMES} - {"engine"})]
)
async def test_each_key_moves_its_own(key, actors):
    rig = Rig("train.colocate_all=true", f"{key}=true")

    moves = [move for turn in ("to_engines", "to_training", "to_sync") for move in list(await rig.moved(turn))]

    assert {move.split()[0] for move in moves} == actors


async def test_engines_sleep_on_through_scoring_where_no_model_scores():
    assert await Rig(*COLOCATED, reward=False).moved("to_scoring") == []


async def test_the_dead_are_passed_over():
    rig = Rig(*COLOCATED)
    rig.actors["engine"].fault = RayActorError()

    assert await rig.moved("to_training") == ["reward offload", "policy reload", "critic reload"]


async def test_nobody_comes_where_somebody_did_not_leave():
    rig = Rig(*COLOCATED)
    rig.actors["engine"].fault = WorkerError("the engine cannot sleep with 3 requests in flight")

    with pytest.raises(WorkerError, match="3 requests in flight"):
        await rig.turns.to_training()

    assert "policy reload" not in rig.moves


async def test_an_actor_that_does_not_answer_is_waited_for_with_a_limit():
    rig = Rig(*COLOCATED, "run.stage_timeout=0.05")
    rig.actors["engine"].seconds = 60

    with pytest.raises(DeadlineError, match=r"the turn of training on the GPUs: no answer within 0.05 s"):
        await rig.turns.to_training()


async def test_two_turns_at_once_follow_each_other():
    rig = Rig(*COLOCATED)
    rig.actors["engine"].seconds = 0.01

    await asyncio.gather(rig.turns.to_training(), rig.turns.to_engines())

    assert rig.moves.index("policy reload") < rig.moves.index("policy offload")
