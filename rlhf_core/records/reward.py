"""A reward is a result with a status, never a bare number: a failure is not a zero."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from rlhf_core.redaction import redact

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class RewardStatus(StrEnum):
    """What became of the scoring of one sample."""

    PENDING = "pending"  # not scored yet
    OK = "ok"
    TIMED_OUT = "timed_out"  # the scorer did not answer within its limit
    ERROR = "error"  # the scorer raised, or answered None, NaN or another type
    SKIPPED = "skipped"  # the sample failed before it could be scored


@dataclass(frozen=True, slots=True, eq=False)
class RewardRequest:
    """One sample to score. Functions and servers read its text; a trained reward model may read its tokens."""

    query: str  # prompt + answer
    prompt: str
    answer: str
    label: Any
    group_id: str
    sample_index: int
    datasource: str
    token_ids: NDArray[np.int32] | None = None  # [T] prompt and answer, as the engine saw and said them
    messages: list[dict[str, Any]] | None = None  # the prompt as chat messages, where it is known as such


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The typed answer for one sample."""

    status: RewardStatus
    reward: float | None = None  # set exactly if status is OK
    score: float | None = None  # what success and pass@k are judged by; the reward where the source gives none
    metrics: dict[str, float] = field(default_factory=dict)  # numeric extra_logs and the parts of a weighted sum
    error: str | None = None  # in the words of code of the user's and of servers, without secrets
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.error is not None:
            object.__setattr__(self, "error", redact(self.error))
