"""A dead engine answers nothing: whoever waits for it must notice."""

import asyncio

import pytest

from rlhf_core.errors import WorkerError
from rlhf_core.generation import liveness
from rlhf_core.generation.liveness import while_alive


class Llm:
    errored = False


async def answer(value, after=0.0):
    await asyncio.sleep(after)
    return value


async def test_an_answer_is_handed_on():
    assert await while_alive(Llm(), answer(7)) == 7


async def test_a_slow_answer_of_a_living_engine_is_waited_for(monkeypatch):
    monkeypatch.setattr(liveness, "LOOK_SECONDS", 0.01)

    assert await while_alive(Llm(), answer(7, after=0.1)) == 7


async def test_a_death_ends_the_wait(monkeypatch):
    monkeypatch.setattr(liveness, "LOOK_SECONDS", 0.01)
    llm = Llm()
    asyncio.get_running_loop().call_later(0.05, setattr, llm, "errored", True)

    with pytest.raises(WorkerError, match="died before it answered"):
        await asyncio.wait_for(while_alive(llm, asyncio.Event().wait()), 5)


async def test_what_the_engine_raises_is_raised():
    async def refuses():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        await while_alive(Llm(), refuses())
