"""What an executor asks of an engine, and what it gets: token ids in, token ids out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rlhf_core.records.trajectory import ImageRef, StopReason, VersionSpan


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one answer. Immutable: two samples of one prompt never share a mutable setting."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None  # derived from (run seed, iteration, prompt, sample)

    @property
    def constrained(self) -> bool:
        """True if the engine renormalises its log-probs (top-p, top-k, no end before ``min_tokens``): not the policy's own."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_tokens > 0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One completion to sample."""

    request_id: str
    prompt_token_ids: list[int]  # [T]
    sampling: SamplingParams
    affinity: str  # requests with one key share a prefix, and go to one engine while its load allows
    images: tuple[ImageRef, ...] = ()
    continues: bool = False  # a later turn of a conversation: most of its prompt is in the cache of its engine


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled completion of ``T`` tokens; the stop token, where there is one, is its last."""

    request_id: str
    token_ids: list[int]  # [T]
    logprobs: list[float]  # [T] log-prob of each sampled token, at the sampling temperature
    version_spans: list[VersionSpan]  # over these T tokens, without gaps
    stop_reason: StopReason
    stop_detail: str = ""  # the stop string or token that matched


class Generate(Protocol):
    """Anything that generates. Executors depend on this, never on an engine."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one completion.

        Raises:
            GenerationError: the engine failed the request or left out a log-prob.
            DeadlineError: no answer within the engine's limit.
        """
        ...
