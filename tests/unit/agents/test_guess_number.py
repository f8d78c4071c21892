"""The example configs/agents/guess_number.py, played in a process of its own by players who follow a script."""

from __future__ import annotations

import asyncio

import pytest

from rlhf_core.agents.environment.pool import EnvironmentPool

pytestmark = pytest.mark.agents

FILE = "configs/agents/guess_number.py"


@pytest.fixture(scope="module")
async def pool():
    argument = {"file": FILE, "args": {}, "tokenizer": {}}
    pool = EnvironmentPool("rlhf_core.agents.entries:agent_file", argument, max_processes=4, step_timeout=20)
    yield pool
    await pool.close()


async def play(pool, seed, player):
    """The steps of one episode; ``player`` says a guess from the feedback so far."""
    async with pool.open(seed) as game:
        start = await game.call("reset", {"observation": "Guess: ", "seed": seed})
        assert start["observation"] == "Guess: "
        steps = []
        while not steps or not steps[-1]["done"]:
            said = {"action_text": player([step["feedback"] for step in steps]), "sampling_params": {"max_tokens": 1}}
            steps.append(await game.call("step", said))
        return steps


def halves(feedback):
    """Asks for the middle of what is left."""
    low, high = 1, 9
    for heard in feedback:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if "Higher" in heard else (low, middle - 1)
    return f" {(low + high) // 2}\n"


async def test_who_listens_always_finds_the_number(pool):
    """Nine numbers, four turns: a tenth for each guess on the way, one for the number."""
    games = await asyncio.gather(*(play(pool, seed, halves) for seed in range(40)))

    for steps in games:
        assert [step["score"] for step in steps] == [0.0] * (len(steps) - 1) + [1.0]
        assert [step["reward"] for step in steps] == [0.1] * (len(steps) - 1) + [1.0]
        assert steps[-1]["logs"] == {"found": 1.0}
    assert {len(steps) for steps in games} == {1, 2, 3, 4}


async def test_who_does_not_listen_is_told_and_pays(pool):
    """Nonsense, then the same wrong guess again and again: it was sensible once."""
    steps = await play(pool, 0, lambda feedback: "9" if feedback else "nine")

    assert [step["reward"] for step in steps] == [-0.1, 0.1, -0.1, -0.1]
    assert [step["feedback"] for step in steps] == [" No number. Guess: ", " Lower. Guess: ", " Lower. Guess: ", ""]
    assert [step["done"] for step in steps] == [False, False, False, True]
    assert steps[-1]["score"] == 0.0


async def test_the_seed_is_the_number(pool):
    first, again = [await asyncio.gather(*(play(pool, seed, halves) for seed in range(12))) for _ in range(2)]

    assert first == again
