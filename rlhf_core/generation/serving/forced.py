"""What the trainer decides about sampling, whatever the client asks for.

=======================================  ======================================================================
temperature, top-p, top-k, min-p         the run's: the trainer divides its logits by that temperature
frequency, presence, repetition penalty  none: clients send them by habit, and the trainer cannot redo them
seed                                     derived from the sample's; see ``Call.seed``
tokens                                   what the session's budgets leave
a grammar, a forced tool, a bias on ids  as the client asks; the call is marked as constrained
=======================================  ======================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_core.agents.sessions.refusal import not_recordable
from rlhf_core.vision.banned import BAN

if TYPE_CHECKING:
    from collections.abc import Collection

    from rlhf_core.agents.sessions import Call

# Of vLLM's requests: what the record cannot hold, or what would make the tokens others than the messages say.
UNRECORDABLE = (
    "use_beam_search",
    "echo",
    "suffix",
    "prompt_embeds",
    "prompt_logprobs",
    "logprob_token_ids",
    "truncate_prompt_tokens",
    "kv_transfer_params",
    "ec_transfer_params",
    "background",
    "previous_response_id",
    "previous_input_messages",
    "repetition_detection",
    "vllm_xargs",
)
# Not in the protocol, so vLLM would ignore them without a word, and the client would take the answer for what it is not.
UNKNOWN = (
    "logits_processors",
    "functions",
    "function_call",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)


def refuse_unrecordable(request: Any) -> None:
    """``CallRefusedError`` if a request of vLLM's protocol asks for what cannot be recorded."""
    for option in UNRECORDABLE:
        value = getattr(request, option, None)
        if value is not None and value is not False:
            raise not_recordable(option)
    for option in UNKNOWN:
        if (request.model_extra or {}).get(option) is not None:
            raise not_recordable(option)


def force(call: Call, params: Any, eos_ids: frozenset[int], banned_ids: Collection[int]) -> Any:
    """vLLM's ``SamplingParams`` of an admitted call; also says in the call whether something constrains it."""
    from msgspec.structs import replace

    ours = call.session.request.sampling
    call.constrained = _constrained(params, ours.min_tokens)
    ignore_eos = params.ignore_eos or ours.ignore_eos
    bias = {**(params.logit_bias or {}), **dict.fromkeys(banned_ids, -BAN)}
    logprobs = {"logprobs": 0, "flat_logprobs": True} if params.logprobs is None else {}
    return replace(
        params,
        temperature=ours.temperature,
        top_p=ours.top_p,
        top_k=ours.top_k,
        min_p=0.0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        repetition_penalty=1.0,
        seed=call.seed(params.seed),
        max_tokens=call.budget,
        min_tokens=min(max(params.min_tokens, ours.min_tokens), call.budget),
        ignore_eos=ignore_eos,
        stop=list(dict.fromkeys([*(params.stop or ()), *ours.stop])),
        stop_token_ids=sorted({*(params.stop_token_ids or ()), *(() if ignore_eos else eos_ids)}),
        logit_bias=bias or None,
        extra_args=None,
        **logprobs,
    )


def _constrained(params: Any, min_tokens: int) -> bool:
    """True if something besides the policy chooses tokens, so that the engine's log-probs are not the policy's own."""
    return bool(
        params.structured_outputs is not None
        or params.logit_bias
        or params.allowed_token_ids
        or params.bad_words
        or params.thinking_token_budget is not None
        or params.min_tokens > min_tokens
    )
