"""Weight updates while requests are in flight, with both answers to what becomes of their KV cache; row 31 and 34 of the cases.

::

    recompute   tokens before the update: the old policy's     after it: the new policy's, as if it had read all of them
    keep                  "                                    after it: the new policy's, on the KV cache of the old one

References are Hugging Face forward passes in fp32 on the ids that the engine returned. Every update comes at a known token.
"""

import asyncio
import shutil
from itertools import pairwise

import numpy as np
import pytest
from engine_rig import (
    CONTEXT,
    EngineRig,
    draw_weights,
    generate,
    halt_at,
    halted,
    kept_logprobs,
    prompt_of,
    reference_logprobs,
    request,
)
from transformers import AutoModelForCausalLM

from rlhf_core.errors import WeightSyncError, WorkerError
from rlhf_core.records import StopReason

pytestmark = pytest.mark.pipeline

FRESH_SEED = 40  # weights that one of the engines was started with
LONG = prompt_of(200, seed=7)  # six blocks of the prefix cache, and some more


@pytest.fixture(scope="module")
async def keeping(tiny_model, tmp_path_factory):
    """The other engine. Its first answers are those of a freshly started one."""
    folder = tmp_path_factory.mktemp("models") / "fresh"
    shutil.copytree(tiny_model, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    draw_weights(model, FRESH_SEED)
    model.save_pretrained(folder)
    rig = EngineRig(folder, partial_rollout_kv="keep")
    await rig.engine.start(version=0)
    yield rig, await ask_again(rig)
    await rig.close()


@pytest.fixture(params=["recompute", "keep"])
def rig(request, engine_rig, keeping):
    return engine_rig if request.param == "recompute" else keeping[0]


def keeps(rig) -> bool:
    return rig.engine.settings.partial_rollout_kv == "keep"


def spoken_by(rig, speakers, prompt, token_ids):
    """[T] log-probs that the engine should report, given who spoke: (model, end of its tokens)."""
    if keeps(rig):
        return kept_logprobs(speakers, prompt, token_ids)
    starts = [0, *(end for _, end in speakers)]
    parts = [
        reference_logprobs(model, prompt, token_ids)[start:end]
        for (model, _), (start, end) in zip(speakers, pairwise(starts), strict=True)
    ]
    return np.concatenate(parts)


async def ask_again(rig):
    """Greedy answers to a long prompt and to one that begins like it."""
    prompts = [LONG, LONG[:150] + prompt_of(30, seed=8)]
    return [await rig.engine.generate(request(p, temperature=0.0, ignore_eos=True)) for p in prompts]


async def test_an_update_after_3_of_8_tokens_case_31(rig):
    await rig.new_weights(seed=4)
    version, old = rig.engine.version, rig.copy_of_model()
    halt_at(rig.engine, 3)
    running = asyncio.create_task(rig.engine.generate(request(LONG, max_tokens=8, ignore_eos=True)))
    await halted(rig.engine)

    await rig.new_weights(seed=5)
    generation = await running

    assert generation.version_spans == [(0, 3, version), (3, 8, version + 1)]
    expected = spoken_by(rig, [(old, 3), (rig.model, 8)], LONG, generation.token_ids)
    assert np.abs(expected - generation.logprobs).max() < 1e-4
    by_new = rig.logprobs(LONG, generation.token_ids)
    by_old = reference_logprobs(old, LONG, generation.token_ids)
    assert np.abs(by_old - by_new).max() > 1
    assert np.abs(by_old - generation.logprobs)[:3].max() < 1e-4
    after = np.abs(by_new - generation.logprobs)[3:].max()
    assert after > 0.1 if keeps(rig) else after < 1e-4


async def test_two_updates_in_one_answer(rig):
    await rig.new_weights(seed=10)
    version, speakers = rig.engine.version, [(rig.copy_of_model(), 3)]
    halt_at(rig.engine, 3, 40)
    running = asyncio.create_task(rig.engine.generate(request(LONG, max_tokens=90, ignore_eos=True)))
    await halted(rig.engine, more=1)
    await rig.new_weights(seed=11)
    speakers.append((rig.copy_of_model(), 40))
    await halted(rig.engine)
    await rig.new_weights(seed=12)
    speakers.append((rig.model, 90))

    generation = await running

    assert generation.version_spans == [(0, 3, version), (3, 40, version + 1), (40, 90, version + 2)]
    expected = spoken_by(rig, speakers, LONG, generation.token_ids)
    assert np.abs(expected - generation.logprobs).max() < 1e-4


async def test_nobody_else_ever_reads_the_old_weights_cache_case_34(rig):
    """Requests that wait at the update, one that comes after it, and one that goes on from an answer it split."""
    await rig.new_weights(seed=20)
    version = rig.engine.version
    halt_at(rig.engine, 50)
    split = asyncio.create_task(generate(rig, [answer_of(80, seed=1), answer_of(90, seed=2)]))
    await halted(rig.engine)
    waiting = asyncio.create_task(generate(rig, [answer_of(40, seed=3), answer_of(40, seed=4)]))
    await asyncio.sleep(0)

    await rig.new_weights(seed=21)
    late = await rig.engine.generate(answer_of(30, seed=5))  # caches the prompt of the split ones, with new weights
    split, waiting = await split, await waiting
    # Up to the block that was being filled, and on: whoever finds the first ones must not find what the split ones put behind.
    turns = [LONG + answer.token_ids[:end] + prompt_of(20) for answer in split for end in (40, 80)]
    later = [await rig.engine.generate(request(turn, ignore_eos=True)) for turn in turns]

    assert [s.version_spans for s in split] == [[(0, 50, version), (50, end, version + 1)] for end in (80, 90)]
    pure = [(LONG, late), *((LONG, w) for w in waiting), *zip(turns, later, strict=True)]
    for prompt, generation in pure:
        assert [span.version for span in generation.version_spans] == [version + 1]
        assert np.abs(rig.logprobs(prompt, generation.token_ids) - generation.logprobs).max() < 1e-5


def answer_of(tokens, seed):
    return request(LONG, seed, max_tokens=tokens, ignore_eos=True)


async def test_after_an_update_as_a_freshly_started_engine_case_34(rig, keeping):
    """The prompt is cached by old weights, and being answered while they change."""
    await rig.new_weights(seed=30)
    await ask_again(rig)
    halt_at(rig.engine, 20)
    split = asyncio.create_task(rig.engine.generate(answer_of(40, seed=1)))
    await halted(rig.engine)

    await rig.new_weights(FRESH_SEED)
    during = await ask_again(rig)
    await split
    after = await ask_again(rig)

    for answers in (during, after):
        for fresh, again in zip(keeping[1], answers, strict=True):
            assert again.token_ids == fresh.token_ids
            assert np.abs(np.subtract(again.logprobs, fresh.logprobs)).max() < 1e-5


async def test_an_update_changes_nothing_but_the_version_where_the_weights_are_the_same(rig):
    """Seeds, stop strings, the least number of tokens, prompts that fill the context and are not read in one step any more."""
    await rig.new_weights(seed=6, scale=0.02)
    batch = [
        *(
            request(prompt_of(20 + i, i), i, f"stop{i}", stop=("e",), ignore_eos=True, temperature=2.0)
            for i in range(6)
        ),
        *(request(prompt_of(30 + i, i), i, f"least{i}", min_tokens=25, temperature=2.0) for i in range(6)),
        *(request(prompt_of(CONTEXT - 30, i), i, f"full{i}", ignore_eos=True, max_tokens=99) for i in range(6)),
        *(request(LONG, i, f"group{i}", ignore_eos=True, max_tokens=60) for i in range(4)),
    ]
    undisturbed = await generate(rig, batch)
    version = rig.engine.version

    halt_at(rig.engine, 2, 12, 24)
    running = asyncio.create_task(generate(rig, batch))
    for more in (2, 1, 0):
        await halted(rig.engine, more)
        await rig.sync()
    disturbed = await running

    assert {g.stop_reason for g in undisturbed} >= {StopReason.STOP, StopReason.CONTEXT_FULL, StopReason.LENGTH}
    for before, after in zip(undisturbed, disturbed, strict=True):
        assert (after.token_ids, after.stop_reason) == (before.token_ids, before.stop_reason)
        assert np.abs(np.subtract(after.logprobs, before.logprobs)).max() < 1e-5
    versions = [[span.version for span in generation.version_spans] for generation in disturbed]
    assert [version, version + 1, version + 2, version + 3] in versions
    assert all(found == sorted(set(found)) for found in versions)


async def test_requests_end_and_are_dropped_while_the_weights_change(rig):
    """An abort reaches the paused engine; what is left goes on."""
    await rig.new_weights(seed=13)
    halt_at(rig.engine, 5)
    dropped = [asyncio.create_task(rig.engine.generate(answer_of(60, seed=i))) for i in range(3)]
    left = asyncio.create_task(rig.engine.generate(answer_of(60, seed=9)))
    await halted(rig.engine)

    update = asyncio.create_task(rig.new_weights(seed=14))
    await asyncio.sleep(0)
    for task in dropped:
        task.cancel()
    await asyncio.gather(*dropped, update, return_exceptions=True)

    assert [span.version for span in (await left).version_spans] == [rig.engine.version - 1, rig.engine.version]
    assert not rig.engine.client.output_processor.has_unfinished_requests()


async def test_an_engine_that_dies_during_an_update_leaves_nobody_waiting_case_46(keeping):
    """The last test of this engine."""
    rig, _ = keeping
    halt_at(rig.engine, 5)
    waiting = [asyncio.create_task(rig.engine.generate(answer_of(60, seed=i))) for i in range(3)]
    batch = asyncio.create_task(generate(rig, [answer_of(60, seed=8), answer_of(60, seed=9)]))
    await halted(rig.engine)

    update = asyncio.create_task(rig.new_weights(seed=15))
    await asyncio.sleep(0.01)
    for core in rig.engine.client.engine_core.resources.engine_manager.processes:
        core.kill()
    async with asyncio.timeout(30):
        *ends, updated = await asyncio.gather(*waiting, batch, update, return_exceptions=True)

    assert {type(end) for end in ends} == {WorkerError}
    assert isinstance(updated, WeightSyncError)
    with pytest.raises(WorkerError):
        await rig.engine.generate(answer_of(5, seed=1))
