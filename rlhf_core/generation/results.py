"""From what vLLM returns to a ``Generation``: nothing is guessed, whatever is missing is an error of that sample."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import GenerationError
from rlhf_core.records import Generation, StopReason, VersionSpan

if TYPE_CHECKING:
    from rlhf_core.records import GenerateRequest


def to_generation(request: GenerateRequest, completion: Any, budget: int) -> Generation:
    """Convert one finished vLLM ``CompletionOutput`` (flat log-probs).

    ``budget`` is how many tokens the request was allowed (``sampling.token_budget``).

    Raises:
        GenerationError: the request was aborted, or a log-prob or the policy version of a token is missing.
    """
    name = request.request_id
    token_ids = list(completion.token_ids)
    flat = completion.logprobs
    values: list[float] = [] if flat is None or flat.token_ids != token_ids else list(flat.logprobs)
    stop_reason, detail = stop_reason_of(name, completion, clipped=budget < request.sampling.max_tokens)
    return Generation(
        request_id=name,
        token_ids=token_ids,
        logprobs=checked_logprobs(name, values, token_ids),
        version_spans=version_spans_of(name, completion.weight_versions, len(token_ids)),
        stop_reason=stop_reason,
        stop_detail=detail,
    )


def stop_reason_of(
    name: str, completion: Any, *, clipped: bool, eos_ids: frozenset[int] | None = None
) -> tuple[StopReason, str]:
    """Why vLLM ended a completion, and what matched.

    Args:
        name: the request's, for messages.
        completion: a finished ``CompletionOutput``.
        clipped: the context, not the budget of new tokens, bounded it.
        eos_ids: the end-of-sequence ids, where other stop tokens may have been passed too; None: only those were. vLLM
            reports the primary one as None.

    Raises:
        GenerationError: it was aborted, or failed.
    """
    reason, matched = completion.finish_reason, completion.stop_reason
    if reason == "stop" and isinstance(matched, str):
        return StopReason.STOP, matched
    if reason == "stop":
        other = eos_ids is not None and matched is not None and matched not in eos_ids
        return (StopReason.STOP if other else StopReason.EOS), "" if matched is None else str(matched)
    if reason == "length":
        return (StopReason.CONTEXT_FULL if clipped else StopReason.LENGTH), ""
    raise GenerationError(f"request {name}: the engine ended it with {reason!r} ({matched!r})")


def checked_logprobs(name: str, values: list[float], token_ids: list[int]) -> list[float]:
    """``values``, if there is a finite one [T] for each sampled token.

    Raises:
        GenerationError: there is not.
    """
    if not token_ids or len(values) != len(token_ids):
        raise GenerationError(
            f"request {name}: {len(values)} log-probs for {len(token_ids)} sampled tokens; the sample is dropped, a missing "
            "log-prob is never taken as 0"
        )
    if not all(map(math.isfinite, values)):
        place = next(index for index, value in enumerate(values) if not math.isfinite(value))
        raise GenerationError(
            f"request {name}: log-prob of token {place} (id {token_ids[place]}) is {values[place]}; check the policy's "
            "weights for NaN or infinity"
        )
    return values


def version_spans_of(name: str, reported: Any, length: int) -> list[VersionSpan]:
    """Which policy version spoke which of ``length`` tokens: vLLM stamps them as they are sampled, also across a pause.

    Raises:
        GenerationError: the report does not cover the tokens.
    """
    if reported is None:
        raise GenerationError(f"request {name}: the engine does not say which policy version spoke its tokens")
    spans = [VersionSpan(span.start, span.end, int(span.version)) for span in reported if span.end > span.start]
    ends = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != ends[:-1] or ends[-1] != length:
        raise GenerationError(f"request {name}: policy versions {spans} do not cover {length} tokens")
    return spans
