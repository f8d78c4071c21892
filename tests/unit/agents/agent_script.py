"""Generators and executors that follow a script, and the episodes they play."""

import asyncio

import numpy as np

from rlhf_core.agents import AgentExecutorBase, Episode
from rlhf_core.errors import GenerationError
from rlhf_core.records import Generation, Part, Prompt, SamplingParams, StopReason, VersionSpan


class Letters:
    """A tokenizer: id 65 is ``A``; ids below 32 are special."""

    def decode(self, token_ids, *, skip_special_tokens=False):
        return "".join(chr(i) for i in token_ids if i >= 32 or not skip_special_tokens)


def answer(request, tokens=(40, 2), logprobs=(-1.2, -0.1), spans=((0, 2, 7),), stop=StopReason.EOS):
    return Generation(request.request_id, list(tokens), list(logprobs), [VersionSpan(*span) for span in spans], stop)


class Scripted:
    """Answers request by request with what the script makes of it: a Generation, or an error to raise."""

    def __init__(self, script=answer):
        self._script = script
        self.requests = []

    async def generate(self, request):
        self.requests.append(request)
        await asyncio.sleep(0)
        said = self._script(request)
        if isinstance(said, BaseException):
            raise said
        return said


class AlwaysFails:
    """An engine that refuses everything."""

    async def generate(self, request):
        raise GenerationError(f"request {request.request_id}: refused")


class SlowButFine:
    """Answers after some seconds."""

    def __init__(self, seconds):
        self._seconds = seconds

    async def generate(self, request):
        await asyncio.sleep(self._seconds)
        return answer(request)


class Environment(AgentExecutorBase):
    """An executor that does what a function of the episode says."""

    def __init__(self, act):
        self._act = act

    async def execute(self, episode):
        return await self._act(episode)


def episode(generate, group="g0", sample=0, prompt=None, **changes):
    fields = {
        "run_id": "run",
        "iteration": 3,
        "prompt": prompt or Prompt(f"row-{group}", "sums", "1 + 1 =", [11, 12, 13], label=2),
        "group_id": group,
        "sample_index": sample,
        "sampling": SamplingParams(max_tokens=8, seed=100 + sample),
        "max_len": 32,
        "generate": generate,
        "tokenizer": Letters(),
    }
    return Episode(**(fields | changes))


def groups(generate, prompts=8, samples=4):
    return [[episode(generate, f"g{p}", s) for s in range(samples)] for p in range(prompts)]


class Shelf:
    """Where a publisher puts its shards."""

    def __init__(self, broken=False):
        self.shards = []
        self._broken = broken

    def publish(self, rows):
        if self._broken:
            raise OSError("disk full")
        self.shards.append(list(rows))
        return Part(f"part-{len(self.shards)}", len(rows), 0, 0, "")

    @property
    def groups(self):
        return [sorted({row.group_id for row in shard}) for shard in self.shards]

    @property
    def rows(self):
        return [row for shard in self.shards for row in shard]


def numbers(array):
    return np.asarray(array, dtype=np.float64).round(4).tolist()
