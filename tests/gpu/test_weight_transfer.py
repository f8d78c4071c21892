"""vLLM's own transfer backends, with a trainer and an engine on real GPUs."""

import asyncio

import pytest
import torch
from engine_rig import ModelSource
from local_group import LocalGroup
from transformers import AutoModelForCausalLM

from rlhf_core.generation.engine import VllmEngine
from rlhf_core.generation.senders import Rendezvous, TransferSender
from rlhf_core.generation.settings import EngineSettings
from rlhf_core.records import GenerateRequest, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize(
    "backend",
    [
        "ipc",
        pytest.param("nccl", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")),
    ],
)
async def test_new_weights_speak(tiny_model, backend):
    settings = EngineSettings(
        model=str(tiny_model),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        device="gpu",
        sync_backend=backend,
        gpu_memory_utilization=0.2,
        enforce_eager=True,
    )
    engine = VllmEngine(settings)
    await engine.start(version=0)
    try:
        torch.cuda.set_device(torch.cuda.device_count() - 1 if backend == "nccl" else 0)
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).cuda()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        rendezvous = Rendezvous("127.0.0.1", 29631, workers_per_engine=1) if backend == "nccl" else None
        group = LocalGroup(engine)
        sender = await asyncio.to_thread(TransferSender.connect, backend, ModelSource(model), group, 0, rendezvous)

        await asyncio.to_thread(sender.send, 1)
        request = GenerateRequest("r", [1, 2, 3], SamplingParams(max_tokens=16, ignore_eos=True, seed=0), affinity="")
        generation = await engine.generate(request)

        with torch.no_grad():
            ids = torch.tensor([[1, 2, 3, *generation.token_ids]], device="cuda")
            expected = model(ids).logits[0, 2:-1].log_softmax(-1).gather(-1, ids[0, 3:, None])[:, 0].cpu()
        assert generation.version_spans == [(0, 16, 1)]
        assert (expected - torch.tensor(generation.logprobs)).abs().max() < 1e-2  # TF32 on one side
        sender.close()
    finally:
        await engine.shutdown()
