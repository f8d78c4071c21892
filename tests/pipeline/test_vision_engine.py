"""One real vLLM engine that reads images: what it says of them is what the trainer says, before and after new weights.

The trainer's side is a ``TokenScorer`` on batches of an ``ImageReader``, as on the ranks; ids are those the engine returned.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
import vision_rows
from engine_rig import halt_at, halted

from rlhf_core.errors import CorruptShardError, GenerationError
from rlhf_core.generation.senders import ShmSender
from rlhf_core.records import ActionRange, GenerateRequest, SamplingParams
from rlhf_core.training.model import TokenScorer
from rlhf_core.training.visual import ImageReader
from rlhf_core.vision import VisionProcessor
from rlhf_core.weights import TensorMeta

pytestmark = [pytest.mark.pipeline, pytest.mark.agents]


class Rig:
    """An engine, and the model it holds as the trainer has it."""

    def __init__(self, seeing):
        self.engine, self.model, self.album = seeing.engine, seeing.model, seeing.album
        self.processor = VisionProcessor.load(seeing.folder)
        self.reader = ImageReader(self.processor, self.album.load, blank_rows=False)
        self.scorer = TokenScorer(self.model, chunk=64, banned_ids=self.processor.placeholder_ids)
        self.sender = ShmSender(self, tag=f"vision-{id(self)}", rank=0)

    def metadata(self):
        return [TensorMeta(name, p.dtype, tuple(p.shape)) for name, p in self.model.named_parameters()]

    def __iter__(self):
        return iter((name, p.detach()) for name, p in self.model.named_parameters())

    def request(self, text, seed=0, **sampling):
        ids, images = vision_rows.show(self.processor, self.album, text, seed)
        params = SamplingParams(**{"max_tokens": 24, "seed": seed, "ignore_eos": True, **sampling})
        return GenerateRequest(f"{text}-{seed}", ids, params, affinity="g", images=images)

    @torch.no_grad()
    def differences(self, requests, generations, after=0):
        """Of the trainer's log-probs from the engine's, all rows in one batch: the largest of each row, ``after`` tokens on."""
        rows = [row_of(asked, said) for asked, said in zip(requests, generations, strict=True)]
        batch = self.reader.tokens(rows)
        found_BT = self.scorer(
            batch.input_ids_BT, batch.action_mask_BT, batch.temperature_B, want_entropy=False, images=batch.images
        ).logprobs_BT
        spans = [row.action_ranges[0] for row in rows]
        return [
            float(np.abs(found_T[start:end].numpy() - row.rollout_logprobs[start:end])[after:].max())
            for found_T, row, (start, end) in zip(found_BT, rows, spans, strict=True)
        ]


def row_of(asked, said):
    """What is trained of an answer; only what a batch looks at."""
    start = len(asked.prompt_token_ids)
    ids = np.array([*asked.prompt_token_ids, *said.token_ids], dtype=np.int32)
    logprobs = np.zeros(len(ids), dtype=np.float32)
    logprobs[start:] = said.logprobs
    blank = np.zeros_like(logprobs)
    return vision_rows.Experience(
        "g", 0, 0, ids, (ActionRange(start, len(ids)),), logprobs, blank, None, None, blank, blank, 0.0, 0.0,
        asked.sampling.temperature, False, asked.images,
    )  # fmt: skip


@pytest.fixture(scope="module")
def rig(seeing):
    rig = Rig(seeing)
    yield rig
    rig.sender.close()


async def generate(rig, requests):
    found = dict([pair async for chunk in rig.engine.generate_many(requests) for pair in chunk])
    return [found[index] for index in range(len(requests))]


async def test_logprobs_of_rows_with_0_1_and_2_images_are_the_trainers_case_64(rig):
    requests = [rig.request(text, seed, temperature=0.8) for seed, text in enumerate(vision_rows.TEXTS * 2)]

    generations = await generate(rig, requests)

    assert max(rig.differences(requests, generations)) < 1e-4


async def test_the_control_another_image_of_the_same_size_is_far_off(rig):
    requests = [rig.request(text, seed) for seed, text in enumerate(vision_rows.TEXTS[1:])]

    generations = await generate(rig, requests)

    for asked, said in zip(requests, generations, strict=True):
        others = [rig.album.inverted(rig.album.load(image)).sha256 for image in asked.images]
        swapped = replace(asked, images=tuple(i._replace(sha256=o) for i, o in zip(asked.images, others, strict=True)))
        assert rig.differences([swapped], [said])[0] > 0.1


async def test_an_image_in_the_feedback_of_turn_two(rig):
    """The prompt of turn two holds what was sampled in turn one, token by token, and then one more image."""
    first = rig.request("<image> look", seed=3)
    said = await rig.engine.generate(first)
    before = [*first.prompt_token_ids, *said.token_ids]
    feedback, images = vision_rows.show(rig.processor, rig.album, "and now <image>?", 4, offset=len(before))
    second = replace(first, request_id="t2", prompt_token_ids=[*before, *feedback], images=(*first.images, *images))

    generation = await rig.engine.generate(second)

    assert len(second.images) == 2
    assert rig.differences([second], [generation])[0] < 1e-4


async def test_the_prefix_cache_knows_images_apart(rig):
    """The same ids for two images of one size, one after the other on a warm cache."""
    first = rig.request("<image>" + "z" * 100, seed=0)
    other = rig.album.inverted(rig.album.load(first.images[0]))
    second = replace(first, images=(first.images[0]._replace(sha256=other.sha256),))

    generations = [await rig.engine.generate(each) for each in (first, first, second)]

    assert max(rig.differences([first, first, second], generations)) < 1e-4
    assert rig.differences([first], [generations[2]])[0] > 1e-3  # what is said of one is not what is said of the other


async def test_the_same_batch_repeats_bit_for_bit(rig):
    batch = [rig.request(text, seed) for seed, text in enumerate(vision_rows.TEXTS * 8)]

    first, second = await generate(rig, batch), await generate(rig, batch)

    assert first == second


async def test_more_images_than_one_step_takes(rig):
    """A prefill in parts would kill vLLM's CPU engine, where requests have seeds."""
    batch = [rig.request("<image>" * 3 + "q" * 60, seed, max_tokens=4) for seed in range(60)]

    generations = await generate(rig, batch)

    assert sum(len(each.prompt_token_ids) for each in batch) > 3 * 2048
    assert [len(each.token_ids) for each in generations] == [4] * 60


async def test_new_weights_of_tower_and_connector_arrive_and_no_feature_of_the_old_ones_stays(rig):
    """The image's features are in the encoder cache, and its KV in the prefix cache, before the update."""
    asked = rig.request("<image> what", seed=5)
    await rig.engine.generate(asked)
    draw_sight(rig.model, seed=1)
    version = rig.engine.version + 1

    await rig.engine.update_weights(rig.sender.send(version))
    generation = await rig.engine.generate(asked)

    assert generation.version_spans == [(0, 24, version)]
    assert rig.differences([asked], [generation])[0] < 1e-4


async def test_requests_in_flight_see_their_images_again_through_the_new_weights_case_31(rig):
    """Pixel values outlive the caches that an update empties; one request shows the same image as another."""
    asked = [
        rig.request(text, seed) for text, seed in (("<image> what", 5), ("<image> why", 5), ("<image> and <image>", 6))
    ]
    version = rig.engine.version
    halt_at(rig.engine, 5)
    running = asyncio.create_task(generate(rig, asked))
    await halted(rig.engine)

    draw_sight(rig.model, seed=2)
    await rig.engine.update_weights(rig.sender.send(version + 1))
    generations = await running

    assert [each.version_spans for each in generations] == [[(0, 5, version), (5, 24, version + 1)]] * 3
    assert max(rig.differences(asked, generations, after=5)) < 1e-4
    assert min(rig.differences(asked, generations)) > 1e-2  # what was said before is not what the new weights see


async def test_an_image_that_the_prefix_cache_covered_is_encoded_for_new_weights(rig):
    """vLLM never sent its pixels to the worker: the cache knew the prompt already."""
    first = rig.request("<image>" + "z" * 100, seed=0)
    await rig.engine.generate(first)
    version = rig.engine.version
    halt_at(rig.engine, 5)
    running = asyncio.create_task(rig.engine.generate(replace(first, request_id="again")))
    await halted(rig.engine)

    draw_sight(rig.model, seed=3)
    await rig.engine.update_weights(rig.sender.send(version + 1))
    generation = await running

    assert generation.version_spans == [(0, 5, version), (5, 24, version + 1)]
    assert rig.differences([first], [generation], after=5)[0] < 1e-4


def draw_sight(model, seed):
    """Other weights for all that reads images."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and ("vision_model" in name or "connector" in name):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)


async def test_a_placeholder_is_never_sampled_even_where_the_model_wants_nothing_else(rig):
    placeholder = rig.processor.image_token_id
    with torch.no_grad():
        before = rig.model.lm_head.weight[placeholder].clone()
        hidden = rig.model.lm_head.weight.mean(0)
        rig.model.lm_head.weight[placeholder] = hidden * 40
    await rig.engine.update_weights(rig.sender.send(rig.engine.version + 1))
    batch = [rig.request(text, seed, max_tokens=64) for seed, text in enumerate(vision_rows.TEXTS)]

    generations = await generate(rig, batch)

    assert not any(placeholder in each.token_ids for each in generations)
    assert max(rig.differences(batch, generations)) < 1e-4
    with torch.no_grad():
        rig.model.lm_head.weight[placeholder] = before
    await rig.engine.update_weights(rig.sender.send(rig.engine.version + 1))


async def test_a_bad_image_fails_its_request_alone(rig):
    good, short, none, many = [rig.request("<image> what", seed, max_tokens=4) for seed in range(4)]
    [image] = short.images
    short = replace(
        short, prompt_token_ids=[*short.prompt_token_ids[: image.start], *short.prompt_token_ids[image.start + 5 :]]
    )
    short = replace(short, images=(image._replace(end=image.end - 5),))
    none = replace(none, images=())
    many = replace(rig.request("<image>" * 4, 9), request_id="many")

    answers = await generate(rig, [good, short, none, many])

    assert len(answers[0].token_ids) == 4
    assert all(isinstance(answer, GenerationError) for answer in answers[1:])
    length = len(short.prompt_token_ids)
    assert f"the prompt has {length} tokens, vLLM makes {length + 5}" in str(answers[1])
    assert "0 images" in str(answers[2])
    assert "image" in str(answers[3])


async def test_an_image_that_is_damaged_in_the_store_fails_its_request(rig, monkeypatch):
    def broken(image):
        raise CorruptShardError(f"{image.uri} is damaged")

    monkeypatch.setattr(rig.engine._images, "_load", broken)

    with pytest.raises(GenerationError, match=r"images/.*png is damaged"):
        await rig.engine.generate(rig.request("<image>", 77))


async def test_requests_with_images_join_a_running_engine(rig):
    asked = [rig.request(text, seed) for seed, text in enumerate(vision_rows.TEXTS)]

    generations = await asyncio.gather(*map(rig.engine.generate, asked))

    assert max(rig.differences(asked, generations)) < 1e-4
