"""Rows to store, and stores that follow a script."""

import time
from typing import ClassVar

import numpy as np
from fsspec.implementations.memory import MemoryFileSystem

from rlhf_core.records import (
    ActionRange,
    Experience,
    RewardResult,
    RewardStatus,
    SamplingParams,
    Stage,
    StageManifest,
    StopReason,
    Trajectory,
    VersionSpan,
)
from rlhf_core.storage import RewardRow


def trajectory(group="g0", sample=0, tokens=(11, 12, 13, 40, 2), start=3, **changes):
    """One turn: ``tokens[start:]`` is the answer."""
    logprobs = np.zeros(len(tokens), np.float32)
    logprobs[start:] = -0.5
    fields = {
        "run_id": "run",
        "iteration": 1,
        "prompt_id": f"row-{group}",
        "group_id": group,
        "sample_index": sample,
        "datasource": "sums",
        "prompt": "1 + 1 =",
        "label": 2,
        "token_ids": np.array(tokens, np.int32),
        "action_ranges": (ActionRange(start, len(tokens)),),
        "rollout_logprobs": logprobs,
        "version_spans": (VersionSpan(start, len(tokens), 7),),
        "stop_reason": StopReason.EOS,
        "sampling": SamplingParams(max_tokens=8, seed=5),
        "answer": " 2",
    }
    return Trajectory(**(fields | changes))


def experience(group="g0", sample=0, length=4, **changes):
    def numbers():
        return np.linspace(-1, 1, length).astype(np.float32)

    fields = {
        "group_id": group,
        "sample_index": sample,
        "segment_index": 0,
        "token_ids": np.arange(length, dtype=np.int32),
        "action_ranges": (ActionRange(1, length),),
        "rollout_logprobs": numbers(),
        "old_logprobs": numbers(),
        "ref_logprobs": None,
        "values": None,
        "advantages": numbers(),
        "returns": numbers(),
        "reward": 0.1,
        "shaped_reward": 1 / 3,
        "temperature": 0.7,
        "constrained": False,
    }
    return Experience(**(fields | changes))


def reward_row(group="g0", sample=0, reward=1.0, **changes):
    return RewardRow(group, sample, RewardResult(RewardStatus.OK, reward, **({"score": reward} | changes)))


def manifest(parts, stage=Stage.ROLLOUT, iteration=1, run_id="run", **changes):
    rows, tokens = sum(p.rows for p in parts), sum(p.tokens for p in parts)
    return StageManifest(run_id, iteration, stage, tuple(parts), rows, tokens, policy_version=7, **changes)


def assert_same(left, right):
    """Field by field, arrays by value and type."""
    for name in type(left).__dataclass_fields__:
        mine, theirs = getattr(left, name), getattr(right, name)
        if isinstance(mine, np.ndarray):
            assert mine.dtype == theirs.dtype, name
            np.testing.assert_array_equal(mine, theirs, err_msg=name)
        else:
            assert mine == theirs, name
            assert type(mine) is type(theirs), name


class ScriptedFileSystem(MemoryFileSystem):
    """A remote store in memory that fails by a script."""

    protocol = "scripted"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]
    failures: ClassVar = []  # raised by the next acts, in turn
    calls = 0
    stalled = ""  # acts on paths that contain it never answer
    ignores_create = False
    loses_answer = False  # the next create is done, and its answer lost

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("scripted://"))

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self._follow_script(path)
        kind = type(self)
        super().pipe_file(path, value, mode="overwrite" if kind.ignores_create else mode, **kwargs)
        if kind.loses_answer:
            kind.loses_answer = False
            raise ConnectionResetError("the answer was lost")

    def put_file(self, local, path, **kwargs):
        self._follow_script(path)
        super().put_file(local, path, **kwargs)

    def cat_file(self, path, **kwargs):
        self._follow_script(path)
        return super().cat_file(path, **kwargs)

    def _follow_script(self, path):
        kind = type(self)
        kind.calls += 1
        if kind.failures:
            raise kind.failures.pop(0)
        if kind.stalled and kind.stalled in path:
            time.sleep(5)

    @classmethod
    def reset(cls):
        cls.store, cls.pseudo_dirs, cls.failures, cls.calls = {}, [""], [], 0
        cls.stalled, cls.ignores_create, cls.loses_answer = "", False, False
