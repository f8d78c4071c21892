"""Engines and models that take turns on one GPU: what leaves frees memory, and comes back as it was."""

import asyncio
import gc

import numpy as np
import pytest
import torch
import training_cases as cases
from engine_rig import ModelSource, draw_weights, reference_logprobs
from local_group import LocalGroup
from transformers import AutoModelForCausalLM

from rlhf_core.errors import WorkerError
from rlhf_core.generation.engine import VllmEngine
from rlhf_core.generation.senders import TransferSender
from rlhf_core.generation.settings import EngineSettings
from rlhf_core.generation.sleeping import NO_WEIGHTS
from rlhf_core.records import GenerateRequest, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

GIB = 2**30
SHARE = 0.2  # of the GPU's memory, nearly all of it KV cache: the model is tiny
REQUEST = GenerateRequest("r", list(range(32, 96)), SamplingParams(max_tokens=16, ignore_eos=True, seed=0), affinity="")


def settings_of(model, level):
    return EngineSettings(
        model=str(model),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        device="gpu",
        sync_backend="ipc",
        gpu_memory_utilization=SHARE,
        enforce_eager=True,
        sleep_level=level,
    )


def free_bytes():
    """Of the GPU, whoever holds the rest."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(0)[0]


@pytest.mark.parametrize("level", [1, 2])
async def test_new_weights_reach_an_engine_in_its_sleep(tiny_model, level):
    total = torch.cuda.mem_get_info(0)[1]
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).cuda()
    engine = VllmEngine(settings_of(tiny_model, level))
    await engine.start(version=0)
    try:
        sender = await asyncio.to_thread(TransferSender.connect, "ipc", ModelSource(model), LocalGroup(engine), 0, None)
        await engine.generate(REQUEST)  # leaves its prefix in the cache
        awake = free_bytes()

        await engine.sleep()
        asleep = free_bytes()
        assert engine.version == (0 if level == 1 else NO_WEIGHTS)
        with pytest.raises(WorkerError, match="asleep"):
            await engine.generate(REQUEST)
        draw_weights(model.cpu(), seed=3)
        model.cuda()
        await asyncio.to_thread(sender.send, 1)
        updated = free_bytes()
        await engine.wake_up()
        generation = await engine.generate(REQUEST)

        kv_cache = 0.5 * SHARE * total  # at least: the rest of the share is vLLM's working memory
        assert asleep - awake > kv_cache
        assert updated - awake > kv_cache  # the update brings back no KV cache
        assert abs(free_bytes() - awake) < GIB
        expected = reference_logprobs(model.cpu(), REQUEST.prompt_token_ids, generation.token_ids)
        assert np.abs(expected - generation.logprobs).max() < 1e-2  # TF32 on one side; old weights are off by nats
        assert {span.version for span in generation.version_spans} == {1}
        sender.close()
    finally:
        await engine.shutdown()


async def test_level_1_wakes_up_with_the_weights_it_had(tiny_model):
    engine = VllmEngine(settings_of(tiny_model, 1))
    await engine.start(version=0)
    try:
        before = await engine.generate(REQUEST)

        await engine.sleep()
        await engine.wake_up()
        after = await engine.generate(REQUEST)

        assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
    finally:
        await engine.shutdown()


def leaving_its_gpu(rank, model, batches, overrides):
    """Updates with a turn of the engines before each: digests as of ``updates``; bytes that were away, and those that this
    freed, all and all but the parameters.
    """
    trainer = cases.make_trainer(rank, model, overrides)
    digests, memory = [trainer.weight_digest()], []
    for iteration, rows in enumerate(batches):
        gc.collect()  # what earlier tests left in this process
        here = torch.cuda.memory_allocated()
        trainer.offload()
        away, freed = trainer._offload.bytes_away, here - torch.cuda.memory_allocated()
        trainer.reload(parameters_only=True)
        memory.append((away, freed, here - torch.cuda.memory_allocated()))
        trainer.reload()
        trainer.update(rows, iteration)
        digests.append(trainer.weight_digest())
    return digests, memory


@pytest.fixture(scope="module")
def ranks():
    pool = cases.RankPool(1, device="gpu")
    yield pool
    pool.close()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_leaves_its_gpu_and_goes_on_bit_for_bit(ranks, tiny_model, stage):
    batches = [cases.experiences(seed=seed) for seed in range(3)]
    settings = ["ds.param_dtype=bf16", f"ds.zero_stage={stage}"]
    [(_, expected)] = ranks.run(cases.updates, str(tiny_model), batches, settings)

    [(digests, memory)] = ranks.run(leaving_its_gpu, str(tiny_model), batches, settings)

    away, freed, freed_but_parameters = memory[-1]  # once there are optimizer states
    assert digests == expected
    assert freed >= away
    assert 0 < freed - freed_but_parameters < 0.3 * freed  # 2 bytes of the 14 or more that a parameter has
