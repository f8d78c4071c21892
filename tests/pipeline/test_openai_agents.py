"""Agents with the real OpenAI client against a real engine: as a function, as a program, elsewhere on the network.

The engine and its server run in this process; agents in theirs. The reference of the log-probs is a Hugging Face forward pass
in fp32 on the very rows that are trained.
"""

import asyncio
import contextlib
import sys
import textwrap

import numpy as np
import openai
import pytest
import torch
import uvicorn
from fastapi import FastAPI, Response
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_core.agents import Episode, run_episode
from rlhf_core.agents.environment.pool import EnvironmentPool
from rlhf_core.agents.openai.command import CommandAgent
from rlhf_core.agents.openai.executor import OpenAIAgentExecutor, OpenAIAgentLimits
from rlhf_core.agents.openai.function import FunctionAgent
from rlhf_core.agents.openai.url import UrlAgent
from rlhf_core.generation.engine import VllmEngine
from rlhf_core.generation.serving.options import ServerOptions
from rlhf_core.generation.serving.server import SessionServer
from rlhf_core.generation.settings import EngineSettings
from rlhf_core.records import Prompt, SamplingParams, StopReason, action_mask

pytestmark = [pytest.mark.pipeline, pytest.mark.agents]

TOKENS = 24  # of all calls of an episode
QUESTION = [{"role": "user", "content": "Say something."}]

# Two calls of half the budget each, the second one streamed and with a tool; the answer is how much was said.
AGENT = """
    TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

    async def run_agent(prompt, label, client, *, messages):
        asked = {"model": (await client.models.list()).data[0].id, "max_tokens": 12}
        first = await client.chat.completions.create(messages=messages, tools=[TOOL], **asked)
        said = first.choices[0].message
        messages += [said.model_dump(exclude_none=True), {"role": "user", "content": "More."}]
        more = ""
        async for chunk in await client.chat.completions.create(messages=messages, tools=[TOOL], stream=True, **asked):
            more += chunk.choices[0].delta.content or ""
        return {"reward": float(label), "extra_logs": {"said": len(said.content or "") + len(more)}}
"""


class Rig:
    """The engine, its server, and a model to check it with."""

    def __init__(self, engine, folder):
        self.engine = engine
        self.server = SessionServer(engine, ServerOptions(model=str(folder)))
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def episode(self, sample=0, label=1.0):
        ids = self.tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
        prompt = Prompt("row-0", "talk", "Say something.", list(ids), label=label, messages=QUESTION)
        return Episode(
            run_id="run",
            iteration=0,
            prompt=prompt,
            group_id="g0",
            sample_index=sample,
            sampling=SamplingParams(max_tokens=TOKENS, temperature=0.8, ignore_eos=True, seed=100 + sample),
            max_len=480,
            generate=self.engine,
            tokenizer=self.tokenizer,
            server=self.server,
        )

    async def play(self, runner, *labels, seconds=60.0, parallel=16):
        """One episode a label, all at once."""
        executor = OpenAIAgentExecutor(runner, OpenAIAgentLimits(seconds, max_calls=8, max_parallel=parallel))
        played = (run_episode(executor, self.episode(index, label)) for index, label in enumerate(labels))
        try:
            return await asyncio.gather(*played)
        finally:
            await executor.close()

    @torch.no_grad()
    def worst_logprob(self, row):
        """Largest distance of a trained token's log-prob from the model's own at the sampling temperature."""
        ids = torch.tensor(row.token_ids.astype(np.int64))[None]
        logprobs = torch.log_softmax(self.model(ids).logits[0, :-1] / row.sampling.temperature, dim=-1)
        own = np.zeros(len(row.token_ids), dtype=np.float32)
        own[1:] = logprobs.gather(-1, ids[0, 1:, None])[:, 0].numpy()
        mask = action_mask(row.action_ranges, len(row.token_ids))
        return float(np.abs(own - row.rollout_logprobs)[mask].max())

    @property
    def idle(self):
        """True if the engine does nothing and no session is open."""
        return not self.engine.client.output_processor.has_unfinished_requests() and not self.server._store.open_ids()


@pytest.fixture(scope="module")
async def rig(tiny_model):
    engine = VllmEngine(
        EngineSettings(
            model=str(tiny_model),
            dtype="float32",
            max_model_len=512,
            max_num_seqs=32,
            device="cpu",
            sync_backend="shm",
            cpu_kv_cache_gib=0.5,
        )
    )
    await engine.start(version=0)
    rig = Rig(engine, tiny_model)
    yield rig
    await rig.server.stop()
    await engine.shutdown()


@contextlib.asynccontextmanager
async def function_agent(tmp_path, source, seconds=60.0):
    file = tmp_path / "agent.py"
    file.write_text(textwrap.dedent(source))
    pool = EnvironmentPool(
        "rlhf_core.agents.entries:agent_file",
        {"file": str(file), "args": {}, "tokenizer": {}},
        max_processes=16,
        step_timeout=seconds,
        timeout_key="agent.episode_timeout",
    )
    try:
        yield FunctionAgent(pool)
    finally:
        await pool.close()


@contextlib.asynccontextmanager
async def service(app):
    """An agent elsewhere; its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/run"
    finally:
        server.should_exit = True
        await serving


async def test_a_function_is_trained_on_exactly_what_the_engine_sampled(rig, tmp_path):
    """It-must-show 3, on the tiny model: tools, a stream, two calls in one row, log-probs as the trainer's."""
    async with function_agent(tmp_path, AGENT) as agent:
        episodes = await rig.play(agent, *[0.0, 1.0] * 4)

    for index, rows in enumerate(episodes):
        [row] = rows
        assert row.error is None
        first, second = row.action_ranges
        assert (first.end - first.start, second.end - second.start) == (12, 12)
        assert row.reward == index % 2
        assert row.stop_reason is StopReason.LENGTH
        assert row.metrics["agent/calls"] == 2
        assert row.metrics["agent/said"] > 0
        assert rig.worst_logprob(row) < 1e-3
    assert len({rows[0].token_ids.tobytes() for rows in episodes}) == 8  # each sample has a seed of its own
    assert rig.idle


async def test_a_program_finds_its_session_in_the_environment(rig, tmp_path):
    script = tmp_path / "agent.py"
    script.write_text(
        textwrap.dedent("""
            import json, sys
            from openai import OpenAI

            task = json.load(sys.stdin)
            said = OpenAI().chat.completions.create(model="any", messages=task["messages"], max_tokens=8)
            print("a log line")
            print(json.dumps({"reward": task["label"], "extra_logs": {"tokens": said.usage.completion_tokens}}))
        """)
    )

    [[row]] = await rig.play(CommandAgent([sys.executable, str(script)]), 2.5)

    assert row.error is None
    assert (row.reward, row.num_actions, row.metrics["agent/tokens"]) == (2.5, 8, 8.0)
    assert rig.worst_logprob(row) < 1e-3
    assert rig.idle


async def test_agents_elsewhere_answer_or_post_their_reward(rig):
    app, posting = FastAPI(), set()

    async def work(task):
        async with openai.AsyncOpenAI(base_url=task["base_url"], api_key=task["api_key"]) as client:
            await client.chat.completions.create(model="policy", messages=task["messages"], max_tokens=4)
            if task["label"] >= 1:
                return {"reward": task["label"]}
            await asyncio.sleep(0.2)
            said = {"reward": 0.25, "metrics": {"turns": 1}, "done": True}
            return await client.post(f"/sessions/{task['session_id']}/reward", body=said, cast_to=object)

    @app.post("/run")
    async def run(task: dict, response: Response):
        if task["label"] >= 1:
            return await work(task)
        posting.add(asyncio.create_task(work(task)))
        response.status_code = 202
        return None

    async with service(app) as first, service(app) as second:
        episodes = await rig.play(UrlAgent([first, second]), 1.0, 0.0, 2.0, 0.0)

    assert [row.error for [row] in episodes] == [None] * 4
    assert [row.reward for [row] in episodes] == [1.0, 0.25, 2.0, 0.25]
    assert [row.metrics.get("agent/turns") for [row] in episodes] == [None, 1.0, None, 1.0]
    assert rig.idle


async def test_agents_that_crash_hang_flood_or_do_nothing_fail_alone(rig, tmp_path):
    source = """
        import os, sys, time

        async def run_agent(prompt, label, client, *, messages):
            if label == "nothing":
                return 1.0
            await client.chat.completions.create(model="any", messages=messages, max_tokens=4)
            if label == "crash":
                os.abort()
            if label == "hang":
                time.sleep(1000)
            if label == "stream":
                stream = await client.chat.completions.create(model="any", messages=messages, stream=True)
                async for chunk in stream:
                    os._exit(3)
            if label == "flood":
                for _ in range(2000):
                    print("x" * 10000)
            return 1.0
    """
    labels = ("fine", "crash", "hang", "nothing", "stream", "flood")
    async with function_agent(tmp_path, source, seconds=8.0) as agent:
        episodes = await rig.play(agent, *labels, seconds=8.0)

    failed = {label: row.error for label, [row] in zip(labels, episodes, strict=True)}
    assert failed["fine"] is failed["flood"] is None
    assert "was killed by SIGABRT" in failed["crash"]
    assert "took more than agent.episode_timeout=8 s" in failed["hang"]
    assert "the agent made no call that was answered" in failed["nothing"]
    assert "exited with code 3" in failed["stream"]
    assert rig.idle


async def test_no_call_without_the_key_of_an_open_session(rig, tmp_path):
    episode = rig.episode()
    executor = OpenAIAgentExecutor(None, OpenAIAgentLimits(60, 8, 1))
    session = await rig.server.open_session(executor._request(episode))

    async def status(key):
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=key, max_retries=0) as client:
            try:
                await client.chat.completions.create(model="policy", messages=QUESTION, max_tokens=1)
            except openai.APIStatusError as error:
                return error.status_code
        return 200

    before = [await status("guessed"), await status(session.api_key)]
    await rig.server.close_session(session.session_id)

    assert [*before, await status(session.api_key)] == [401, 200, 409]
    assert rig.idle
