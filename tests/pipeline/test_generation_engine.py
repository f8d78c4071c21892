"""One real vLLM engine on CPU: log-probs are the model's own, weights arrive whole, a batch repeats bit for bit.

The references are Hugging Face forward passes in fp32 on the very token ids that the engine returned.
"""

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_rig import CONTEXT, ModelSource, generate, prompt_of, request

from rlhf_core.errors import GenerationError, WeightSyncError, WorkerError
from rlhf_core.generation.engine import VllmEngine
from rlhf_core.generation.senders import ShmSender
from rlhf_core.generation.withheld import TOKENS
from rlhf_core.records import GenerateRequest, SamplingParams, StopReason

pytestmark = pytest.mark.pipeline

EOS, SECOND_EOS = 258, 65  # the tiny model's own, and one that only its generation config knows (conftest.py)


@pytest.fixture
def rig(engine_rig):
    return engine_rig


def groups(num_prompts: int, samples: int, seed: int = 0, **sampling) -> list[GenerateRequest]:
    prompts = [prompt_of(5 + 7 * index % 90, seed + index) for index in range(num_prompts)]
    return [request(p, 100 * i + j, f"{i}.{j}", **sampling) for i, p in enumerate(prompts) for j in range(samples)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_the_trainer_case_64(rig, temperature):
    await rig.new_weights(seed=1)
    requests = groups(8, 2, temperature=temperature)

    generations = await generate(rig, requests)

    for asked, generation in zip(requests, generations, strict=True):
        expected = rig.logprobs(asked.prompt_token_ids, generation.token_ids, temperature)
        assert np.abs(expected - generation.logprobs).mean() < 1e-4


async def test_greedy_tokens_are_the_models_case_64(rig):
    prompt = prompt_of(20)

    generation = await rig.engine.generate(request(prompt, temperature=0.0, max_tokens=20, ignore_eos=True))

    expected = rig.logprobs(prompt, generation.token_ids)
    ids = torch.tensor([prompt + generation.token_ids])
    assert rig.model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == generation.token_ids
    assert np.abs(expected - generation.logprobs).max() < 1e-4


async def test_new_weights_speak_and_no_cache_of_the_old_ones_case_34(rig):
    """The prompt's KV cache is warm before the update; the embedding is tied to the output layer."""
    prompt = prompt_of(200)
    await rig.new_weights(seed=2)
    before = await rig.engine.generate(request(prompt, ignore_eos=True))
    version = rig.engine.version

    await rig.new_weights(seed=3)
    after = await rig.engine.generate(request(prompt, ignore_eos=True))

    assert np.abs(rig.logprobs(prompt, after.token_ids) - after.logprobs).max() < 1e-5
    assert np.abs(rig.logprobs(prompt, before.token_ids) - before.logprobs).max() > 1  # the old weights are far off
    assert [g.version_spans for g in (before, after)] == [[(0, 32, version)], [(0, 32, version + 1)]]


async def test_tokens_of_a_rollout_leave_the_core_many_at_a_time(rig, monkeypatch):
    states, sent = rig.engine._llm.output_processor, []
    process = states.process_outputs

    def counted(outputs, *arguments, **more):
        sent.append([len(output.new_token_ids) for output in outputs])
        return process(outputs, *arguments, **more)

    monkeypatch.setattr(states, "process_outputs", counted)

    generations = await generate(rig, groups(4, 2, max_tokens=2 * TOKENS + 3, ignore_eos=True))

    assert [len(generation.token_ids) for generation in generations] == [2 * TOKENS + 3] * 8
    assert [sizes for sizes in sent if sizes] == [[TOKENS] * 8, [TOKENS] * 8, [3] * 8]


async def tokens_spoken(engine: VllmEngine, count: int) -> None:
    states = engine._llm.output_processor.request_states
    while not any(state.detokenizer.num_output_tokens() >= count for state in states.values()):
        await asyncio.sleep(0.001)


async def test_the_same_batch_repeats_bit_for_bit_case_114(rig):
    """32 prompts × 4 samples on 64 slots, before and after other work; another seed gives other answers."""
    batch = groups(32, 4, max_tokens=48)

    first = await generate(rig, batch)
    await asyncio.gather(*(rig.engine.generate(request(prompt_of(n), n)) for n in (3, 90, 31)))
    await generate(rig, groups(5, 3, seed=50))
    second = await generate(rig, batch)

    assert [g.token_ids for g in first] == [g.token_ids for g in second]
    assert [g.logprobs for g in first] == [g.logprobs for g in second]
    assert first == second
    other = await rig.engine.generate(dataclasses.replace(batch[0], sampling=SamplingParams(max_tokens=48, seed=9)))
    assert other.token_ids != first[0].token_ids


async def test_every_end_of_sequence_id_ends_an_answer_case_71(rig):
    """The id stays, as the last one, and is trained (case 72)."""
    await rig.new_weights(seed=6, scale=0.02)

    generations = await generate(rig, groups(32, 2, max_tokens=300, temperature=2.0))

    ended = [g for g in generations if g.stop_reason is StopReason.EOS]
    assert {g.token_ids[-1] for g in ended} == {EOS, SECOND_EOS}
    assert not any({EOS, SECOND_EOS} & set(g.token_ids[:-1]) for g in generations)
    assert all(len(g.logprobs) == len(g.token_ids) for g in ended)


async def test_limits_have_their_own_reasons_cases_70_and_82(rig):
    short, clipped = await generate(
        rig,
        [
            request(prompt_of(10), max_tokens=4, ignore_eos=True),
            request(prompt_of(CONTEXT - 6), max_tokens=10, ignore_eos=True),
        ],
    )

    assert (short.stop_reason, len(short.token_ids)) == (StopReason.LENGTH, 4)
    assert (clipped.stop_reason, len(clipped.token_ids)) == (StopReason.CONTEXT_FULL, 6)


async def test_a_stop_string_keeps_what_was_sampled_case_72(rig):
    """The match is trained. Behind an unfinished UTF-8 character (random bytes) vLLM sees it later: left out here."""
    await rig.new_weights(seed=6, scale=0.02)
    batch = groups(16, 2, max_tokens=200, temperature=2.0, stop=("e",), ignore_eos=True)

    stopped = [g for g in await generate(rig, batch) if g.stop_reason is StopReason.STOP]

    seen_at_once = 0
    for generation in stopped:
        assert generation.stop_detail == "e"
        texts = [rig.tokenizer.decode([token]) for token in generation.token_ids]
        match = next(index for index, text in enumerate(texts) if "e" in text)
        if match > 0 and texts[match - 1].isascii():
            assert len(generation.token_ids) == len(generation.logprobs) == match + 1
            seen_at_once += 1
    assert seen_at_once > 3


async def test_a_stop_string_may_be_a_special_token(rig):
    await rig.new_weights(seed=6, scale=0.02)
    batch = groups(8, 2, max_tokens=400, temperature=2.0, stop=("<|im_start|>",), ignore_eos=True)

    generations = await generate(rig, batch)

    assert {g.token_ids[-1] for g in generations if g.stop_reason is StopReason.STOP} == {257}


async def test_min_tokens_hold_back_the_end_of_sequence(rig):
    await rig.new_weights(seed=6, scale=0.02)
    batch = groups(16, 2, max_tokens=100, temperature=2.0)
    held = [dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, min_tokens=60)) for r in batch]

    assert min(len(g.token_ids) for g in await generate(rig, batch)) < 60
    assert min(len(g.token_ids) for g in await generate(rig, held)) >= 60


async def test_a_bad_request_fails_alone(rig):
    requests = [request(prompt_of(5)), request(prompt_of(CONTEXT), name="long"), request([5, 99999], name="odd")]

    good, long, odd = await generate(rig, requests)

    assert len(good.token_ids) == len(good.logprobs) > 0
    assert isinstance(long, GenerationError)
    assert isinstance(odd, GenerationError)
    assert "request odd" in str(odd)


async def test_nan_weights_are_errors_not_answers_case_54(rig):
    await rig.new_weights(seed=7)
    with torch.no_grad():
        rig.model.model.norm.weight.fill_(float("nan"))
    await rig.engine.update_weights(rig.sender.send(rig.engine.version + 1))

    with pytest.raises(GenerationError, match="NaN"):
        await rig.engine.generate(request(prompt_of(5)))

    with torch.no_grad():
        rig.model.model.norm.weight.fill_(1.0)
    await rig.new_weights(seed=7)
    assert (await rig.engine.generate(request(prompt_of(5)))).token_ids


async def test_damaged_weights_are_refused_and_the_old_ones_go_on_case_36(rig):
    batch = groups(2, 2)
    before = await generate(rig, batch)
    version = rig.engine.version
    update = rig.sender.send(version + 1)
    path = Path(update.payload["path"])
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)

    with pytest.raises(WeightSyncError, match=r"checksum .* keeps its old weights"):
        await rig.engine.update_weights(update)

    assert rig.engine.version == version
    assert await generate(rig, batch) == before


async def test_a_stale_file_is_refused(rig):
    update = rig.sender.send(rig.engine.version)
    payload = {**update.payload, "version": update.version + 1}

    with pytest.raises(WeightSyncError, match="a stale file"):
        await rig.engine.update_weights(dataclasses.replace(update, version=update.version + 1, payload=payload))

    await rig.engine.check_health()


async def test_an_incomplete_model_silences_the_engine_until_a_whole_one_comes_case_36(rig, tmp_path):
    whole = rig.sender

    class WithoutLastLayer(ModelSource):
        def __iter__(self):
            return ((name, tensor) for name, tensor in super().__iter__() if "layers.1." not in name)

    part = ShmSender(WithoutLastLayer(rig.model), tag=f"part-{id(rig)}", rank=0)
    with pytest.raises(WeightSyncError, match=r"lack .* parameters of the model, such as model\.layers\.1\."):
        await rig.engine.update_weights(part.send(rig.engine.version + 1))
    with pytest.raises(WorkerError, match="damaged"):
        await rig.engine.generate(request(prompt_of(5)))

    await rig.engine.update_weights(whole.send(rig.engine.version + 1))
    part.close()

    generation = await rig.engine.generate(request(prompt_of(50)))
    assert np.abs(rig.logprobs(prompt_of(50), generation.token_ids) - generation.logprobs).max() < 1e-5


async def test_cancelled_requests_leave_nothing_behind(rig):
    stream = rig.engine.generate_many(groups(4, 2, max_tokens=400, ignore_eos=True))
    waiting = asyncio.ensure_future(anext(stream))
    await tokens_spoken(rig.engine, 1)

    waiting.cancel()
    await asyncio.wait([waiting])

    assert not rig.engine._llm.output_processor.has_unfinished_requests()
    assert (await rig.engine.generate(request(prompt_of(5)))).token_ids
