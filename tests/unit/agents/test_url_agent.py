"""Agents elsewhere on the network: real HTTP servers that follow a script."""

import asyncio
import contextlib
import json
import re
import socket

import pytest

from rlhf_core.agents.openai import url as url_module
from rlhf_core.agents.openai.answer import AgentAnswer
from rlhf_core.agents.openai.task import AgentTask
from rlhf_core.agents.openai.url import UrlAgent, shown_url
from rlhf_core.errors import AgentDeadlineError, AgentError
from rlhf_core.records import Session

pytestmark = pytest.mark.agents

TASK = AgentTask(Session("s0", "http://10.0.0.9/v1", "key-0"), "2 + 5 =", {"sum": 7}, [], seed=3)
PIPE = None  # of a script: close the connection without an answer


class Service:
    """Answers request by request with the next of its script, the last one for ever: (status, body, seconds)."""

    def __init__(self, *script):
        self.script, self.bodies, self.open, self.most_open = list(script), [], 0, 0

    async def __call__(self, reader, writer):
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(re.search(r"(?i)content-length: (\d+)", head)[1])
            self.bodies.append(json.loads(await reader.readexactly(length)))
            status, body, seconds = self.script.pop(0) if len(self.script) > 1 else self.script[0]
            await asyncio.sleep(seconds)
            if status is not PIPE:
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            writer.close()


@contextlib.asynccontextmanager
async def serving(*services):
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for service in services:
            server = await stack.enter_async_context(await asyncio.start_server(service, "127.0.0.1", 0))
            urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/run")
        agent = UrlAgent(urls, unreached_seconds=0.5)
        stack.push_async_callback(agent.close)
        yield agent


def nobody():
    """A URL at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/run"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(url_module, "FIRST_PAUSE", 0.02)


async def test_the_task_is_posted_and_the_answer_is_the_reward():
    service = Service((200, {"reward": 0.5, "extra_logs": {"steps": 2}}, 0))

    async with serving(service) as agent:
        assert await agent.run(TASK, 20) == AgentAnswer(0.5, None, {"steps": 2.0})

    assert service.bodies == [TASK.document()]


@pytest.mark.parametrize(
    ("status", "body", "answer"),
    [
        (200, 1, AgentAnswer(1.0)),
        (200, None, AgentAnswer()),
        (200, b"", AgentAnswer()),
        (204, b"", AgentAnswer()),
        (202, {"accepted": True}, AgentAnswer(posted_later=True)),
    ],
)
async def test_answers(status, body, answer):
    async with serving(Service((status, body, 0))) as agent:
        assert await agent.run(TASK, 20) == answer


async def test_episodes_are_spread_over_the_agents():
    services = [Service((200, 1, 0.3)) for _ in range(3)]

    async with serving(*services) as agent:
        await asyncio.gather(*(agent.run(TASK, 20) for _ in range(30)))

    assert [len(service.bodies) for service in services] == [10, 10, 10]


async def test_another_agent_takes_over_before_the_episode_began():
    """Nobody listens at one, the next has a full queue."""
    full, fine = Service((503, b"full", 0)), Service((200, 1, 0))

    async with serving(full, fine) as agent:
        agent._open = {nobody(): 0} | agent._open
        assert await agent.run(TASK, 20) == AgentAnswer(1.0)

    assert (len(full.bodies), len(fine.bodies)) == (1, 1)


async def test_an_agent_that_died_behind_its_gateway_may_have_begun():
    gateway, other = Service((502, b"", 0)), Service((200, 1, 0))

    async with serving(gateway, other) as agent:
        with pytest.raises(AgentError, match="answered 502"):
            await agent.run(TASK, 20)

    assert other.bodies == []


async def test_a_busy_agent_is_waited_for():
    """Longer than for one that is not there."""
    service = Service(*[(429, b"later", 0.2)] * 5, (200, 1, 0))

    async with serving(service) as agent:
        assert await agent.run(TASK, 20) == AgentAnswer(1.0)


async def test_an_agent_that_restarts_is_waited_for():
    agent = UrlAgent([nobody()], unreached_seconds=20)
    port = int(re.search(r":(\d+)", next(iter(agent._open)))[1])
    running = asyncio.create_task(agent.run(TASK, 20))
    await asyncio.sleep(0.2)

    async with await asyncio.start_server(Service((200, 1, 0)), "127.0.0.1", port):
        assert await running == AgentAnswer(1.0)
    await agent.close()


async def test_nobody_there_is_an_error_that_names_every_agent():
    urls = [nobody(), nobody()]
    agent = UrlAgent(urls, unreached_seconds=0.2)

    with pytest.raises(AgentError, match=r"^no agent of agent.url can be reached: http.*: no connection: .*; http"):
        await agent.run(TASK, 20)
    await agent.close()


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((500, b"Traceback ...", 0), r"^the agent at http://127.0.0.1:\d+/run answered 500 X: Traceback \.\.\.$"),
        ((404, b"", 0), "answered 404 X"),
        ((301, b"", 0), "answered 301 X"),
        ((PIPE, b"", 0), "broke the connection"),
        ((200, b"fine", 0), "answered 'fine', which is no JSON"),
        ((200, {"reward": "high"}, 0), "the reward of the agent at http://.* is the str 'high'"),
        ((200, b"x" * (2 << 20), 0), "answered more than 1024 KiB"),
    ],
)
async def test_an_episode_that_began_is_not_given_to_another_agent(reply, message):
    first, second = Service(reply), Service((200, 1, 0))

    async with serving(first, second) as agent:
        with pytest.raises(AgentError, match=message):
            await agent.run(TASK, 20)

    assert second.bodies == []


async def test_an_agent_that_hangs():
    service = Service((200, 1, 60))

    async with serving(service) as agent:
        with pytest.raises(
            AgentDeadlineError, match=r"no agent of agent.url answered within agent.episode_timeout=0\.3 s"
        ):
            await agent.run(TASK, 0.3)
        assert agent._open == dict.fromkeys(agent._open, 0)


async def test_a_failed_agent_frees_its_place():
    async with serving(Service((500, b"", 0)), Service((200, 1, 0))) as agent:
        for _ in range(4):
            with contextlib.suppress(AgentError):
                await agent.run(TASK, 20)

        assert set(agent._open.values()) == {0}


def test_messages_show_no_secrets():
    assert shown_url("https://user:secret@host:1/run?token=secret") == "https://host:1/run"
