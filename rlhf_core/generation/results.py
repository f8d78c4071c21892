"""From what vLLM returns to a ``Generation``: nothing is guessed, whatever is missing is an error of that sample."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import GenerationError
from rlhf_core.records import Generation, StopReason, VersionSpan

if TYPE_CHECKING:
    from rlhf_core.records import GenerateRequest


def to_generation(request: GenerateRequest, completion: Any, budget: int, fallback_version: int | None) -> Generation:
    """Convert one finished vLLM ``CompletionOutput`` (flat log-probs).

    ``budget`` is how many tokens the request was allowed (``sampling.token_budget``); ``fallback_version`` spoke all
    tokens if vLLM does not say which did, None: unknown.

    Raises:
        GenerationError: the request was aborted, or a log-prob or the policy version of a token is missing.
    """
    token_ids = list(completion.token_ids)
    stop_reason, detail = _stop_reason(request, completion, budget)
    return Generation(
        request_id=request.request_id,
        token_ids=token_ids,
        logprobs=_logprobs(request, completion.logprobs, token_ids),
        version_spans=_version_spans(request, completion.weight_versions, len(token_ids), fallback_version),
        stop_reason=stop_reason,
        stop_detail=detail,
    )


def _stop_reason(request: GenerateRequest, completion: Any, budget: int) -> tuple[StopReason, str]:
    """The only stop tokens we pass are the model's end-of-sequence ids; vLLM reports the primary one as None."""
    reason, matched = completion.finish_reason, completion.stop_reason
    if reason == "stop" and isinstance(matched, str):
        return StopReason.STOP, matched
    if reason == "stop":
        return StopReason.EOS, "" if matched is None else str(matched)
    if reason == "length":
        clipped = budget < request.sampling.max_tokens
        return (StopReason.CONTEXT_FULL if clipped else StopReason.LENGTH), ""
    raise GenerationError(f"request {request.request_id}: the engine ended it with {reason!r} ({matched!r})")


def _logprobs(request: GenerateRequest, flat: Any, token_ids: list[int]) -> list[float]:
    """[T] log-prob of each sampled token."""
    values: list[float] = [] if flat is None else list(flat.logprobs)
    if not token_ids or len(values) != len(token_ids) or flat.token_ids != token_ids:
        raise GenerationError(
            f"request {request.request_id}: {len(values)} log-probs for {len(token_ids)} sampled tokens; the sample is "
            "dropped, a missing log-prob is never taken as 0"
        )
    if not all(map(math.isfinite, values)):
        place = next(index for index, value in enumerate(values) if not math.isfinite(value))
        raise GenerationError(
            f"request {request.request_id}: log-prob of token {place} (id {token_ids[place]}) is {values[place]}; "
            "check the policy's weights for NaN or infinity"
        )
    return values


def _version_spans(
    request: GenerateRequest, reported: Any, length: int, fallback_version: int | None
) -> list[VersionSpan]:
    if reported is None:
        if fallback_version is None:
            raise GenerationError(
                f"request {request.request_id}: the engine does not say which policy version spoke its tokens, and the "
                "weights changed meanwhile"
            )
        return [VersionSpan(0, length, fallback_version)]
    spans = [VersionSpan(span.start, span.end, int(span.version)) for span in reported if span.end > span.start]
    ends = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != ends[:-1] or ends[-1] != length:
        raise GenerationError(f"request {request.request_id}: policy versions {spans} do not cover {length} tokens")
    return spans
