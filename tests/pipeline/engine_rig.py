"""A real engine, the model it holds as the trainer has it, and a scheduler that stops where a test says.

::

    halt_at(engine, 3) ─▶ a file ─▶ halting.py: pauses by itself once a request has spoken 3 tokens ─▶ halted(engine) returns
                                    and goes on when a weight update, which pauses once more, resumes
"""

import asyncio
import json
import random
from pathlib import Path

import numpy as np
import torch
from halting import write_halts
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_core.generation.engine import VllmEngine
from rlhf_core.generation.senders import ShmSender
from rlhf_core.generation.settings import EngineSettings
from rlhf_core.records import GenerateRequest, SamplingParams
from rlhf_core.weights import TensorMeta

CONTEXT = 512
LIMIT_SECONDS = 60


class HaltingSettings(EngineSettings):
    """Settings of an engine that halts on demand; nothing else differs from those of a run."""

    __slots__ = ()

    def engine_arguments(self):
        arguments = super().engine_arguments()
        names = {"halts": str(halts_of(self.model)), "scheduler": arguments.get("scheduler_cls")}
        return arguments | {"scheduler_cls": "halting.halting_scheduler", "additional_config": names}


def halts_of(model: str) -> Path:
    """Every halting engine needs a folder of its own."""
    return Path(model) / "halts.json"


def halt_at(engine: VllmEngine, *tokens: int) -> None:
    """Stop whenever a request has spoken so many tokens, in this order."""
    write_halts(halts_of(engine.settings.model), tokens)


async def halted(engine: VllmEngine, more: int = 0) -> None:
    """Return when the engine has stopped, with ``more`` stops to come."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while len(json.loads(halts_of(engine.settings.model).read_text())) != more:
            await asyncio.sleep(0.005)


class ModelSource:
    """The parameters of a Hugging Face model, as the trainer would send them: tied tensors once."""

    def __init__(self, model):
        self.model = model

    def metadata(self):
        return [TensorMeta(name, p.dtype, tuple(p.shape)) for name, p in self.model.named_parameters()]

    def __iter__(self):
        return iter((name, p.detach()) for name, p in self.model.named_parameters())


class EngineRig:
    """An engine, the folder of its model, and a way to give it other weights."""

    def __init__(self, folder: Path, **settings):
        self.engine = VllmEngine(
            HaltingSettings(
                model=str(folder),
                dtype="float32",
                max_model_len=CONTEXT,
                max_num_seqs=64,
                device="cpu",
                sync_backend="shm",
                cpu_kv_cache_gib=0.25,
                cpu_threads=2,  # with one, results do not depend on the batch and repeating them would prove nothing
                **settings,
            )
        )
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.sender = ShmSender(ModelSource(self.model), tag=f"test-{id(self)}", rank=0)

    async def close(self):
        self.sender.close()
        await self.engine.shutdown()

    async def sync(self):
        """Send the model as it is, as the next version."""
        await self.engine.update_weights(self.sender.send(self.engine.version + 1))

    async def new_weights(self, seed: int, scale: float = 0.1):
        """Draw weights far from those before, and sync them as the next version."""
        draw_weights(self.model, seed, scale)
        await self.sync()

    def logprobs(self, prompt: list[int], token_ids: list[int], temperature: float = 1.0) -> np.ndarray:
        return reference_logprobs(self.model, prompt, token_ids, temperature)

    def copy_of_model(self):
        copy = AutoModelForCausalLM.from_config(self.model.config)
        copy.load_state_dict(self.model.state_dict())
        return copy


@torch.no_grad()
def draw_weights(model, seed: int, scale: float = 0.1) -> None:
    """Matrices from N(0, scale): .1 gives peaked distributions, so stale weights are far off; .02 gives flat ones."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


@torch.no_grad()
def reference_logprobs(model, prompt, token_ids, temperature=1.0) -> np.ndarray:
    """[T] of the answer, by one forward pass over prompt and answer."""
    logits = model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
    return _of_tokens(logits / temperature, token_ids)


@torch.no_grad()
def kept_logprobs(speakers, prompt, token_ids) -> np.ndarray:
    """[T] where each of ``speakers``, (model, end of its tokens), goes on with the KV cache that the one before left it.

    The last token sampled before an update is read only after it.
    """
    cache, done, found = None, 0, []
    ids = [*prompt, *token_ids]
    for model, end in speakers:
        upto = len(prompt) + end - 1
        output = model(torch.tensor([ids[done:upto]]), past_key_values=cache, use_cache=True)
        first = max(len(prompt), done + 1)
        logits = output.logits[0, first - 1 - done :]
        found.append(_of_tokens(logits, ids[first : upto + 1]))
        cache, done = output.past_key_values, upto
    return np.concatenate(found)


def _of_tokens(logits, token_ids) -> np.ndarray:
    return torch.log_softmax(logits, dim=-1).gather(-1, torch.tensor(token_ids)[:, None])[:, 0].numpy()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """ASCII without small letters, so that no stop string and no unfinished character stands in it."""
    return random.Random(seed).choices(range(32, 97), k=length)


def request(prompt, seed=0, name="r", **sampling) -> GenerateRequest:
    return GenerateRequest(name, prompt, SamplingParams(**{"max_tokens": 32, "seed": seed, **sampling}), affinity="g")


async def generate(rig, requests):
    found = dict([pair async for chunk in rig.engine.generate_many(requests) for pair in chunk])
    assert sorted(found) == list(range(len(requests)))
    return [found[index] for index in range(len(requests))]
