"""Two hundred steps with environments of which a quarter crashes and a twentieth hangs: counts are right, nothing grows."""

from __future__ import annotations

import asyncio
import os
from collections import Counter

import pytest
from environment_rig import children_of, descriptors, pool_of, resident_mib, until, write_game

from rlhf_core.errors import AgentDeadlineError, AgentError

pytestmark = pytest.mark.agents

STEPS = 200
EPISODES = 4  # of a step
WARM_UP = 40  # steps after which nothing may grow any more
LIMIT = 2.0  # seconds: an episode that does no harm must stay below it on a busy machine

GAME = """
    import os, re, signal, subprocess, sys, time

    def misbehave(kind):
        if kind == 0: os._exit(5)
        if kind == 1: os.kill(os.getpid(), signal.SIGKILL)
        if kind == 2: raise ValueError("lost")
        if kind == 3: os.abort()
        if kind == 4: sys.exit(1)
        if kind == 10: time.sleep(1000)
        if kind == 30: re.match("(a+)+$", "a" * 50 + "b")  # holds the interpreter's lock

    class Game:
        def reset(self, payload):
            self.kind, self.turns = payload["kind"], 0
            if self.kind % 7 == 0: subprocess.Popen(["sleep", "1000"])

        def step(self, payload):
            self.turns += 1
            if self.turns == 2: misbehave(self.kind)
            return {"turns": self.turns, "text": "x" * 10_000}

        def close(self, payload): pass
"""


async def play(pool, index: int) -> str:
    """One episode of three turns; what became of it. Of 40 episodes in a row, 10 crash and 2 hang."""
    kind = index % 20 if index % 20 < 5 else index % 40
    try:
        async with pool.open(index) as environment:
            await environment.call("reset", {"kind": kind})
            for _ in range(3):
                last = await environment.call("step", {})
            return f"{last['turns']} turns"
    except AgentDeadlineError:
        return "hung"
    except AgentError as error:
        return "raised" if "raised" in str(error) else "died"


@pytest.mark.timeout(240)
async def test_two_hundred_steps(tmp_path):
    """::

    of 40 episodes    4 die by os._exit or abort, 2 by SIGKILL, 4 raise, 2 hang, 28 play three turns
    """
    counts: Counter[str] = Counter()
    steps = iter(range(STEPS))

    async def lane(pool) -> None:
        """A run whose rollouts overlap: one step after the other, several at a time."""
        for step in steps:
            episodes = [play(pool, step * EPISODES + index) for index in range(EPISODES)]
            counts.update(await asyncio.gather(*episodes))
            if step == WARM_UP:
                before.update(measure(pool))

    def measure(pool) -> dict[str, float]:
        return {"controller": resident_mib(os.getpid()), "template": resident_mib(pool._template.pid)}

    before: dict[str, float] = {}
    async with pool_of(write_game(tmp_path, GAME), max_processes=16, step_timeout=LIMIT) as pool:
        await pool.start()
        open_at_start, tasks_at_start = descriptors(), len(asyncio.all_tasks())

        await asyncio.gather(*(lane(pool) for _ in range(8)))

        after = measure(pool)
        assert await until(lambda: children_of(pool._template.pid) == [])
        assert pool.processes == 0
        assert await until(lambda: descriptors() == open_at_start)
        assert len(asyncio.all_tasks()) == tasks_at_start
    episodes = STEPS * EPISODES
    assert counts == {
        "3 turns": episodes * 28 // 40,
        "died": episodes * 6 // 40,
        "raised": episodes * 4 // 40,
        "hung": episodes * 2 // 40,
    }
    assert after["controller"] - before["controller"] < 4
    assert after["template"] - before["template"] < 1
