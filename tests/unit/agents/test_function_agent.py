"""``run_agent`` in a process of its own, with a real client, against an HTTP server that follows a script."""

import asyncio
import contextlib
import json
import re
import textwrap

import pytest

from rlhf_core.agents.environment.pool import EnvironmentPool
from rlhf_core.agents.openai.answer import AgentAnswer
from rlhf_core.agents.openai.function import FunctionAgent, function_factory
from rlhf_core.agents.openai.task import AgentTask
from rlhf_core.errors import AgentDeadlineError, AgentError, ConfigError
from rlhf_core.records import Session

pytestmark = pytest.mark.agents

AGENT = """
import os

async def run_agent(prompt, label, client, *, messages, seed, style="plain"):
    reply = await client.chat.completions.create(model="any", messages=messages)
    said = reply.choices[0].message.content
    return {"reward": float(said == label), "extra_logs": {"seed": seed, "style": len(style), "prompt": len(prompt)}}
"""


class Model:
    """An OpenAI-compatible server that always says the same."""

    def __init__(self, said="7"):
        self.said, self.requests, self.keys = said, [], []

    async def __call__(self, reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                body = await reader.readexactly(int(re.search(r"(?i)content-length: (\d+)", head)[1]))
                self.requests.append(json.loads(body))
                self.keys.append(re.search(r"(?i)authorization: Bearer (\S+)", head)[1])
                message = {"role": "assistant", "content": self.said}
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                said = {"id": "1", "object": "chat.completion", "created": 0, "model": "any", "choices": [choice]}
                content = json.dumps(said).encode()
                head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
                writer.write(head.encode() + content)
                await writer.drain()


@contextlib.asynccontextmanager
async def agent_of(tmp_path, source, seconds=30.0, args=None, said="7"):
    """The agent of a file, its server, and the task of an episode."""
    file = tmp_path / "agent.py"
    file.write_text(textwrap.dedent(source))
    model = Model(said)
    async with await asyncio.start_server(model, "127.0.0.1", 0) as server:
        pool = EnvironmentPool(
            "rlhf_core.agents.entries:agent_file",
            {"file": str(file), "args": args or {}, "tokenizer": {}},
            max_processes=4,
            step_timeout=seconds,
            timeout_key="agent.episode_timeout",
        )
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        messages = [{"role": "user", "content": "2 + 5 ="}]
        task = AgentTask(Session("s0", url, "key-0"), "2 + 5 =", "7", messages, seed=3)
        try:
            yield FunctionAgent(pool), task, model
        finally:
            await pool.close()


async def test_an_async_agent_speaks_through_its_client(tmp_path):
    async with agent_of(tmp_path, AGENT, args={"style": "terse"}) as (agent, task, model):
        said = await asyncio.gather(*(agent.run(task, 20) for _ in range(6)))

    assert said == [AgentAnswer(1.0, None, {"seed": 3.0, "style": 5.0, "prompt": 7.0})] * 6
    assert model.keys == ["key-0"] * 6
    assert model.requests[0] == {"model": "any", "messages": [{"role": "user", "content": "2 + 5 ="}]}


async def test_plain_and_odd_agents(tmp_path, monkeypatch):
    """One file, several agents by label: a plain function with an event loop of its own, and what may go wrong."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # where nobody listens
    source = """
        import asyncio, os, sys

        def run_agent(prompt, label, client):
            if label == "crash":
                os.abort()
            if label == "raise":
                raise ValueError("no such tool")
            if label == "text":
                return "great"
            if label == "own client":
                from openai import OpenAI
                return float(len(OpenAI().chat.completions.create(model="m", messages=[]).choices))
            async def own():
                return client.chat.completions.create(model="any", messages=[]).choices[0].message.content
            return float(asyncio.run(own()) == label)
    """
    async with agent_of(tmp_path, source) as (agent, task, _):

        async def run(label):
            told = AgentTask(task.session, task.prompt, label, task.messages, task.seed)
            try:
                return await agent.run(told, 20)
            except AgentError as error:
                return str(error)

        labels = ("7", "own client", "crash", "raise", "text")
        said = dict(zip(labels, await asyncio.gather(*map(run, labels)), strict=True))

    assert said["7"] == said["own client"] == AgentAnswer(1.0)
    assert "was killed by SIGABRT" in said["crash"]
    assert "raised ValueError: no such tool (agent.py:" in said["raise"]
    assert "the reward of run_agent is the str 'great'" in said["text"]


async def test_an_agent_that_hangs_is_killed(tmp_path):
    async with agent_of(tmp_path, "import time\ndef run_agent(p, l, c): time.sleep(100)", seconds=2.0) as (
        agent,
        task,
        _,
    ):
        with pytest.raises(AgentDeadlineError, match=r"agent.episode_timeout=2 s; its process was killed"):
            await agent.run(task, 2.0)


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (lambda prompt, label: 0, {}, "must take .prompt, label, client. and every key of agent.args: too many"),
        (lambda prompt, label, client: 0, {"style": 1}, "unexpected keyword argument 'style'"),
        (lambda prompt, label, client, *, style: 0, {}, "missing a required .*argument: 'style'"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_at_the_start(function, args, message):
    with pytest.raises(ConfigError, match=f"^agent.py: run_agent.*{message}"):
        function_factory(function, args, "agent.py")


def test_a_function_of_anything_gets_all_of_the_arguments():
    assert function_factory(lambda *told, **args: 0, {"style": 1}, "agent.py")(0) is not None
