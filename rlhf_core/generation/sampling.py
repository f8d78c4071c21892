"""From a request to vLLM's sampling parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_core.errors import GenerationError
from rlhf_core.vision.banned import BAN

if TYPE_CHECKING:
    from collections.abc import Collection

    from rlhf_core.records import GenerateRequest


def token_budget(request: GenerateRequest, max_model_len: int) -> int:
    """Tokens that may be sampled: ``max_tokens``, or what the context leaves.

    Raises:
        GenerationError: the request cannot be served at all.
    """
    room = max_model_len - len(request.prompt_token_ids)
    if not request.prompt_token_ids:
        raise GenerationError(f"request {request.request_id}: the prompt is empty")
    if room < 1:
        raise GenerationError(
            f"request {request.request_id}: a prompt of {len(request.prompt_token_ids)} tokens leaves no room for an "
            f"answer in a context of {max_model_len}: raise vllm.max_model_len, or lower data.max_len"
        )
    return min(request.sampling.max_tokens, room)


def to_sampling_params(
    request: GenerateRequest, budget: int, eos_ids: frozenset[int], banned_ids: Collection[int] = ()
) -> Any:
    """vLLM's ``SamplingParams`` for at most ``budget`` tokens, with exactly what the trajectory needs switched on.

    ``banned_ids`` are never sampled: placeholders of images.

    Raises:
        ValueError: vLLM refuses a value.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = request.sampling
    return SamplingParams(
        max_tokens=budget,
        min_tokens=min(sampling.min_tokens, budget),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=[] if sampling.ignore_eos else sorted(eos_ids),
        stop=list(sampling.stop),
        logit_bias=dict.fromkeys(banned_ids, -BAN) or None,
        detokenize=bool(sampling.stop),  # text is needed for nothing else
        skip_special_tokens=False,  # so that a stop string may be a special token
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,  # one list instead of one dict a token
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # made for this request alone
    )
