"""The OpenAI-compatible server in front of a real engine: rows hold what vLLM sampled, log-probs are the model's own.

Random weights say bytes that are no text, and pairs of letters that no text is encoded to: every follow-up needs the session's
own tokens.
"""

import asyncio
import base64
import hashlib
import io
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import openai
import pytest
import torch
import vision_rows
from engine_rig import HaltingSettings, halt_at, halted
from transformers import AutoModelForCausalLM

from rlhf_core.agents.sessions import export_segments
from rlhf_core.generation.engine import VllmEngine
from rlhf_core.generation.senders import ShmSender
from rlhf_core.generation.serving.options import ServerOptions
from rlhf_core.generation.serving.server import SessionServer
from rlhf_core.records import GenerateRequest, SamplingParams, SessionRequest, StopReason
from rlhf_core.vision import VisionProcessor
from rlhf_core.weights import TensorMeta

pytestmark = [pytest.mark.pipeline, pytest.mark.agents]

TEMPERATURE = 0.7
REQUEST = SessionRequest(
    "s", SamplingParams(max_tokens=24, temperature=TEMPERATURE, seed=7), max_tokens=200, max_len=700, max_calls=9
)


class Rig:
    """An engine, its server, and the model that it holds."""

    def __init__(self, engine, server, model):
        self.engine, self.server, self.model = engine, server, model
        self.sender = ShmSender(self, tag=f"serving-{id(self)}", rank=0)

    def metadata(self):
        return [TensorMeta(name, p.dtype, tuple(p.shape)) for name, p in self.model.named_parameters()]

    def __iter__(self):
        return iter((name, p.detach()) for name, p in self.model.named_parameters())

    async def new_weights(self, seed):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.ndim > 1:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
        await self.engine.update_weights(self.sender.send(self.engine.version + 1))

    async def client(self, name):
        session = await self.server.open_session(replace(REQUEST, session_id=name))
        return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)

    async def rows(self, name):
        record = await self.server.close_session(name)
        return record, export_segments(record)

    def worst(self, row):
        """The largest difference of a row's log-probs from the model's."""
        return max(worst(self.model, row, start, end) for start, end in row.action_ranges)

    def copy_of_model(self):
        copy = AutoModelForCausalLM.from_config(self.model.config)
        copy.load_state_dict(self.model.state_dict())
        return copy


@torch.no_grad()
def worst(model, row, start, end):
    """The largest difference of a row's log-probs from a model's, from ``start`` to ``end``."""
    logits_TV = model(torch.tensor([row.token_ids])).logits[0, start - 1 : end - 1] / TEMPERATURE
    ids = torch.tensor(row.token_ids[start:end])
    own = torch.log_softmax(logits_TV, dim=-1).gather(-1, ids[:, None])[:, 0]
    return float(np.abs(own.numpy() - row.logprobs[start:end]).max())


@pytest.fixture(scope="module")
async def rig(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "served"
    shutil.copytree(tiny_model, folder)
    settings = HaltingSettings(
        str(folder), "float32", 1024, 64, device="cpu", sync_backend="shm", cpu_kv_cache_gib=0.25, cpu_threads=2
    )
    engine = VllmEngine(settings)
    await engine.start(version=0)
    server = SessionServer(engine, ServerOptions(model=str(tiny_model)))
    rig = Rig(engine, server, AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32))
    await rig.new_weights(1)
    yield rig
    rig.sender.close()
    await server.stop()
    await engine.shutdown()


def user(text):
    return {"role": "user", "content": text}


async def say(client, messages, **options):
    """Sample, and return the message with vLLM's own ids."""
    body = {"return_token_ids": True, "ignore_eos": True}
    answer = await client.chat.completions.create(model="policy", messages=messages, extra_body=body, **options)
    choices = [
        (choice.message.model_dump(exclude_none=True, include={"role", "content"}), tuple(choice.token_ids))
        for choice in answer.choices
    ]
    return choices if len(choices) > 1 else choices[0]


async def test_three_turns_are_one_row_and_its_logprobs_are_the_models(rig) -> None:
    client = await rig.client("three")
    messages, told = [user("hello")], []
    for text in ("and?", "so?", ""):
        said, ids = await say(client, messages)
        told.append(ids)
        messages += [said, user(text)]

    record, [row] = await rig.rows("three")

    assert [row.token_ids[start:end] for start, end in row.action_ranges] == told
    assert [call.continued for call in record.calls] == [False, True, True]
    assert rig.worst(row) < 1e-3


async def test_branches_of_several_choices(rig) -> None:
    client = await rig.client("tree")
    choices = await say(client, [user("hello")], n=3)
    await asyncio.gather(*(say(client, [user("hello"), said, user("b")]) for said, _ in choices[1:]))

    record, rows = await rig.rows("tree")

    assert len({call.token_ids for call in record.calls}) == 5
    assert sorted(len(row.calls) for row in rows) == [1, 2, 2]
    assert sum(e - s for row in rows for s, e in row.action_ranges) == sum(len(c.token_ids) for c in record.calls)
    assert max(rig.worst(row) for row in rows) < 1e-3


async def test_new_weights_between_and_during_calls_case_31(rig) -> None:
    """The second call streams while they change, and says 5 of its 24 tokens before; the third goes on from both."""
    before = rig.engine.version
    client = await rig.client("versions")
    spoke = {before: rig.copy_of_model()}
    said, _ = await say(client, [user("hello")])
    await rig.new_weights(2)
    spoke[before + 1] = rig.copy_of_model()
    halt_at(rig.engine, 5)
    streaming = asyncio.create_task(streamed(client, [user("hello"), said, user("b")]))
    await halted(rig.engine)
    await rig.new_weights(3)
    spoke[before + 2] = rig.model
    second = {"role": "assistant", "content": await streaming}
    await say(client, [user("hello"), said, user("b"), second, user("c")])

    record, [row] = await rig.rows("versions")

    assert [call.version_spans for call in record.calls] == [
        ((0, 24, before),),
        ((0, 5, before + 1), (5, 24, before + 2)),
        ((0, 24, before + 2),),
    ]
    assert [call.continued for call in record.calls] == [False, True, True]
    assert sum(span.end - span.start for span in row.version_spans) == 3 * 24
    for start, end, version in row.version_spans:
        assert worst(spoke[version], row, start, end) < 1e-3


async def streamed(client, messages) -> str:
    stream = await client.chat.completions.create(
        model="policy", messages=messages, stream=True, extra_body={"ignore_eos": True}
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def test_a_disconnected_client_frees_the_engine(rig) -> None:
    client = await rig.client("gone")
    with pytest.raises(openai.APITimeoutError):
        await client.with_options(timeout=0.05).chat.completions.create(
            model="policy", messages=[user("x" * 300)], extra_body={"ignore_eos": True}
        )
    async with asyncio.timeout(10):
        while rig.engine.client.output_processor.request_states:
            await asyncio.sleep(0.02)

    record, rows = await rig.rows("gone")

    assert [call.stop_reason for call in record.calls] in ([StopReason.ABORTED], [])
    assert rows == []


async def test_direct_requests_go_on_beside_the_server(rig) -> None:
    client = await rig.client("beside")
    direct = GenerateRequest("r", [*b"hello"], SamplingParams(max_tokens=24, seed=1, ignore_eos=True), affinity="")
    alone = await rig.engine.generate(direct)
    beside, (_, ids) = await asyncio.gather(rig.engine.generate(direct), say(client, [user("hello")]))

    record, _ = await rig.rows("beside")

    assert beside.token_ids == alone.token_ids
    assert record.calls[0].token_ids == ids


async def test_an_image_in_the_first_turn_and_one_in_the_second(seeing) -> None:
    folder, album, engine, shelf = seeing.folder, seeing.album, seeing.engine, Shelf()
    image_token_id = engine.image_processor.image_token_id
    options = ServerOptions(model=folder, banned_ids=tuple(engine.banned_ids), image_token_id=image_token_id)
    server = SessionServer(engine, options, shelf.put)
    rig = Rig(engine, server, seeing.model)
    client = await rig.client("seen")

    first = [{"role": "user", "content": [image_part(album, 1), {"type": "text", "text": "look"}]}]
    said, one = await say(client, first)
    second = [*first, said, {"role": "user", "content": [image_part(album, 2), image_part(album, 1)]}]
    _, two = await say(client, second)
    for shown in ([], [image_part(album, 1)]):  # the trainer would look for an image there
        with pytest.raises(openai.BadRequestError, match="image token"):
            await say(client, [{"role": "user", "content": [*shown, {"type": "text", "text": "what is <image>?"}]}])
    record, [row] = await rig.rows("seen")
    await server.stop()
    rig.sender.close()

    assert [row.token_ids[start:end] for start, end in row.action_ranges] == [one, two]
    assert record.calls[1].continued
    assert [len(png) > 0 for png in shelf.files.values()] == [True, True]
    assert shelf.puts == 2  # each image once
    assert record.refused_calls == 2
    assert [image.sha256 for image in row.images] == [sha256_of(album, seed) for seed in (1, 2, 1)]
    assert {image.uri for image in row.images} == set(shelf.files)
    assert worst_with_images(rig.model, VisionProcessor.load(folder), album, row) < 1e-3


class Shelf:
    """Keeps PNGs, as a run's store does."""

    def __init__(self):
        self.files, self.puts = {}, 0

    def put(self, png):
        self.puts += 1
        uri = f"images/{hashlib.sha256(png).hexdigest()}.png"
        self.files[uri] = png
        return uri


@torch.no_grad()
def worst_with_images(model, processor, album, row):
    found = []
    for start, end in row.action_ranges:
        shown = SimpleNamespace(
            token_ids=row.token_ids, images=row.images, action_ranges=[(start, end)], temperature=TEMPERATURE
        )
        own = vision_rows.own_logprobs(model, processor, album, shown).numpy()
        found.append(float(np.abs(own - row.logprobs[start:end]).max()))
    return max(found)


def image_part(album, seed):
    """A data: URL of a picture; JPEG would lose what the album keeps."""
    written = io.BytesIO()
    picture = vision_rows.picture(seed, vision_rows.SIZES[seed % 3])
    album.add(picture)
    picture.save(written, "PNG")
    url = "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def sha256_of(album, seed):
    return album.add(vision_rows.picture(seed, vision_rows.SIZES[seed % 3])).sha256
