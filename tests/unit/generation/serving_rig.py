"""A server over a scripted engine core, and what tests want to know about it."""

import asyncio
import contextlib
import functools
import itertools
from dataclasses import replace

import openai
from scripted_core import EOS, ScriptedCore
from vllm.v1.engine.core_client import EngineCoreClient

from rlhf_core.agents.sessions import export_segments
from rlhf_core.data.tiny_model import make_tiny_model
from rlhf_core.generation.engine import VllmEngine
from rlhf_core.generation.serving.options import ServerOptions
from rlhf_core.generation.serving.server import SessionServer
from rlhf_core.generation.settings import EngineSettings
from rlhf_core.records import SamplingParams, SessionRequest

CONTEXT = 1024
NAMES = itertools.count()


def tokens(text: str, end: int | None = EOS) -> list[int]:
    """A reply of the tiny model: bytes, and the end of the turn."""
    return [*text.encode(), *([] if end is None else [end])]


class Rig:
    """One engine whose core follows a script; servers over it are cheap."""

    def __init__(self, engine, core, folder):
        self.engine = engine
        self.core = core
        self.folder = folder
        self.tokenizer = engine.client.renderer.tokenizer

    @contextlib.asynccontextmanager
    async def server(self, **options):
        server = SessionServer(self.engine, ServerOptions(model=str(self.folder), **options))
        try:
            yield server
        finally:
            await server.stop()

    def script(self, *replies):
        """What the next requests are answered."""
        self.core.replies.clear()
        self.core.replies.extend(tokens(reply) if isinstance(reply, str) else reply for reply in replies)

    @property
    def last_prompt(self) -> list[int]:
        return self.core.requests[-1].prompt_token_ids

    def decode(self, ids) -> str:
        return self.tokenizer.decode(list(ids))


@functools.cache
def shared_client() -> openai.AsyncOpenAI:
    """Making one costs more than a hundred calls."""
    return openai.AsyncOpenAI(base_url="http://nowhere", api_key="none", max_retries=0, timeout=120.0)


class Play:
    """One session, and an OpenAI client for it."""

    def __init__(self, server, session):
        self.server = server
        self.session = session
        self.client = shared_client().with_options(base_url=session.base_url, api_key=session.api_key)

    async def chat(self, messages, **options):
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return await self.client.chat.completions.create(model="policy", messages=messages, **options)

    async def streamed(self, messages, **options):
        """The message that a stream amounts to."""
        stream = await self.chat(messages, stream=True, **options)
        content, calls = "", {}
        async for chunk in stream:
            delta = chunk.choices[0].delta
            content += delta.content or ""
            for part in delta.tool_calls or ():
                call = calls.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
                call["id"] += part.id or ""
                call["name"] += part.function.name or ""
                call["arguments"] += part.function.arguments or ""
        message = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [
                {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
                for c in calls.values()
            ]
        return message

    async def close(self):
        return await self.server.close_session(self.session.session_id)

    async def rows(self, **options):
        """Record and rows."""
        record = await self.close()
        return record, export_segments(record, **options)


def request_of(**changes) -> SessionRequest:
    sampling = SamplingParams(max_tokens=300, temperature=0.7, seed=11)
    base = SessionRequest(f"s{next(NAMES)}", sampling, max_tokens=400, max_len=CONTEXT, max_calls=16)
    return replace(base, **changes)


@contextlib.asynccontextmanager
async def playing(server, **changes):
    session = await server.open_session(request_of(**changes))
    play = Play(server, session)
    try:
        yield play
    finally:
        await server.close_session(session.session_id)


async def start_rig(folder, monkeypatch) -> Rig:
    core = ScriptedCore()
    monkeypatch.setattr(EngineCoreClient, "make_async_mp_client", lambda *args, **kwargs: core)
    model = make_tiny_model(folder / "tiny", seed=0)
    engine = VllmEngine(
        EngineSettings(str(model), "float32", CONTEXT, 64, device="cpu", sync_backend="shm", request_timeout=20.0)
    )
    await engine.start(version=3)
    return Rig(engine, core, model)


async def until(condition, seconds=5.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
