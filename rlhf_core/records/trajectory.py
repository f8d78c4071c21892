"""The token-level trajectory: the one record that crosses every axis of the system.

A worked example, one turn, prompt of 3 tokens, answer of 2 (the last one EOS), spoken by policy version 7::

    token_ids        = [11, 12, 13, 40, 2]
    action_ranges    = [ActionRange(3, 5)]
    rollout_logprobs = [0., 0., 0., -1.2, -.1]      # index t: log p(token_t | tokens before t); 0 outside actions
    version_spans    = [VersionSpan(3, 5, 7)]
    step_rewards     = []                           # position = index of the action token that earned it
    stop_reason      = StopReason.EOS               # so EOS is part of the action and is trained

Text is never tokenised again between sampling and training: these ids are what the engine saw and said.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlhf_core.records.reward import RewardStatus
from rlhf_core.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from rlhf_core.records.generation import SamplingParams


class StopReason(StrEnum):
    """Why a trajectory ended.

    An episode of several turns ends with DONE, MAX_TURNS, LENGTH, CONTEXT_FULL or ERROR: EOS and STOP end a turn, and then the
    environment has its say. LENGTH and CONTEXT_FULL are then about all turns together, and come before DONE where the last
    action was cut off.
    """

    EOS = "eos"  # the policy said an end-of-sequence token; it belongs to the action and is trained
    STOP = "stop"  # a stop string or stop token matched; what was sampled up to it, the match included, is trained
    LENGTH = "length"  # the budget of new tokens was used up: truncated
    CONTEXT_FULL = "context_full"  # prompt + answer reached the model's context: truncated
    DONE = "done"  # the environment ended the episode
    MAX_TURNS = "max_turns"  # the limit of turns was reached
    ABORTED = "aborted"  # cancelled from outside; never trained
    ERROR = "error"  # failed; ``error`` says why; never trained

    @property
    def truncated(self) -> bool:
        """True if the policy was cut off rather than finished."""
        return self in (StopReason.LENGTH, StopReason.CONTEXT_FULL)


class ActionRange(NamedTuple):
    """Tokens ``[start, end)`` of a row that the policy spoke."""

    start: int
    end: int


class VersionSpan(NamedTuple):
    """Tokens ``[start, end)`` of a row that policy version ``version`` spoke."""

    start: int
    end: int
    version: int


class StepReward(NamedTuple):
    """A reward earned at one action token (the last one of its turn)."""

    position: int
    reward: float


class ImageRef(NamedTuple):
    """An image of the prompt or of environment feedback, by content, and where a row of tokens shows it."""

    sha256: str  # of size and canonical RGB pixels, hex
    uri: str  # where the PNG lies, below the run's root
    start: int  # its placeholder tokens are [start, end) of the row; the model puts the image's features there
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One sample (or one segment of it): a row of the rollout shards. ``T`` = ``len(token_ids)``."""

    run_id: str
    iteration: int
    prompt_id: str  # row id of the prompt in its dataset
    group_id: str  # the samples of one prompt in one iteration share it
    sample_index: int  # 0 .. n_samples_per_prompt - 1
    datasource: str
    prompt: str  # readable text, never tokenised again
    label: Any  # any JSON value, type kept
    token_ids: NDArray[np.int32]  # [T]
    action_ranges: tuple[ActionRange, ...]
    rollout_logprobs: NDArray[np.float32]  # [T] 0 outside actions
    version_spans: tuple[VersionSpan, ...]
    stop_reason: StopReason
    sampling: SamplingParams
    round: int = 0
    segment_index: int = 0
    messages: Any = None  # the chat messages before the last answer; None where the prompt was plain text
    step_rewards: tuple[StepReward, ...] = ()
    reward: float | None = None  # given by the executor; None until the reward stage
    score: float | None = None
    reward_status: RewardStatus = RewardStatus.PENDING
    error: str | None = None  # the reason, where stop_reason is ERROR, without secrets
    answer: str = ""  # what the policy said, in its last turn, decoded once for people and reward functions
    transcript: str = ""  # where there are several turns: the text from the first action to the last, specials included
    images: tuple[ImageRef, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    started_at: float = 0.0  # unix seconds
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.error is not None:
            object.__setattr__(self, "error", redact(self.error))

    @property
    def key(self) -> tuple[str, int, int]:
        """What names this row within an iteration: (group, sample, segment)."""
        return (self.group_id, self.sample_index, self.segment_index)

    @property
    def failed(self) -> bool:
        """True if the row must not be trained."""
        return self.stop_reason in (StopReason.ERROR, StopReason.ABORTED)

    @property
    def num_actions(self) -> int:
        """Tokens the policy spoke."""
        return sum(r.end - r.start for r in self.action_ranges)

    @property
    def temperature(self) -> float:
        """The sampling temperature: the trainer divides its logits by it."""
        return self.sampling.temperature

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that spoke in this row; None if nobody did."""
        return min((s.version for s in self.version_spans), default=None)


def oldest_version_of(rows: Iterable[Trajectory]) -> int | None:
    """The oldest policy version that spoke in any of the rows; None if nobody did."""
    return min((row.oldest_version for row in rows if row.oldest_version is not None), default=None)


def action_mask(ranges: Iterable[ActionRange], length: int) -> NDArray[np.bool_]:
    """``[T]`` True where the policy spoke."""
    mask = np.zeros(length, dtype=np.bool_)
    for start, end in ranges:
        mask[start:end] = True
    return mask
