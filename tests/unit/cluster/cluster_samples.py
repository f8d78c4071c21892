"""Rows, configurations and engines that follow a script."""

import asyncio

import numpy as np
from ray.exceptions import RayActorError

from rlhf_core.records import (
    ActionRange,
    GenerateRequest,
    Generation,
    RewardResult,
    RewardStatus,
    SamplingParams,
    StopReason,
    Trajectory,
    VersionSpan,
)


def row(group="g0", sample=0, answer=2, reward=None, stop=StopReason.EOS, **changes):
    """A prompt of 2 tokens and an answer of ``answer`` tokens with log-prob -0.5 each."""
    length = 2 + answer
    logprobs = np.zeros(length, np.float32)
    logprobs[2:] = -0.5
    fields = {
        "run_id": "run",
        "iteration": 0,
        "prompt_id": f"row-{group}",
        "group_id": group,
        "sample_index": sample,
        "datasource": "sums",
        "prompt": "1 + 1 =",
        "label": 2,
        "token_ids": np.arange(length, dtype=np.int32),
        "action_ranges": (ActionRange(2, length),) if answer else (),
        "rollout_logprobs": logprobs,
        "version_spans": (VersionSpan(2, length, 0),) if answer else (),
        "stop_reason": stop,
        "sampling": SamplingParams(max_tokens=8),
        "answer": "2",
        "reward": reward,
        "score": reward,
        "reward_status": RewardStatus.PENDING if reward is None else RewardStatus.OK,
    }
    return Trajectory(**(fields | changes))


def failed(group="g0", sample=0, reason="ValueError: broken"):
    """The record of a sample that failed before its first action."""
    status = RewardStatus.SKIPPED
    return row(group, sample, answer=0, stop=StopReason.ERROR, error=reason, reward_status=status)


def scored(rows, rewards):
    """Results by episode: a number, or a status where there is none."""
    return {
        (r.group_id, r.sample_index): RewardResult(value)
        if isinstance(value, RewardStatus)
        else RewardResult(RewardStatus.OK, value, value)
        for r, value in zip(rows, rewards, strict=True)
    }


def request(name, affinity="g0"):
    return GenerateRequest(name, [1, 2], SamplingParams(max_tokens=8), affinity)


def generation(asked):
    return Generation(asked.request_id, [5], [-0.5], [VersionSpan(0, 1, 0)], StopReason.EOS)


class Method:
    """``handle.method.remote(...)``."""

    def __init__(self, function):
        self.remote = function


class FakeEngine:
    """An engine actor: each call is answered by a script, an async generator of chunks of (index, result)."""

    def __init__(self, script=None):
        self.calls = []  # requests of each call
        self.aborted = []  # ids of requests that were taken back, of each call
        self._script = script or all_at_once
        self.generate_stream = Method(self._stream)
        self.abort_requests = Method(self._abort)

    @property
    def names(self):
        return [[asked.request_id for asked in call] for call in self.calls]

    async def _abort(self, request_ids):
        self.aborted.append(list(request_ids))

    async def _stream(self, requests):
        self.calls.append(list(requests))
        async for chunk in self._script(requests):
            yield _ready(chunk)


async def _ready(chunk):
    return chunk


async def all_at_once(requests):
    yield [(i, generation(asked)) for i, asked in enumerate(requests)]


async def one_by_one(requests):
    for i, asked in enumerate(requests):
        await asyncio.sleep(0)
        yield [(i, generation(asked))]


async def never(requests):
    await asyncio.sleep(3600)
    yield []


def dies_after(count, error=None):
    """Answers so many requests, then the process is gone."""

    async def script(requests):
        yield [(i, generation(asked)) for i, asked in enumerate(requests[:count])]
        raise error or RayActorError()

    return script
