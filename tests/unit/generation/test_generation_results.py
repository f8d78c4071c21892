"""From vLLM's output to a generation: what is missing is an error of that sample, never a default."""

from types import SimpleNamespace

import pytest

from rlhf_core.errors import GenerationError
from rlhf_core.generation.results import to_generation
from rlhf_core.records import GenerateRequest, SamplingParams, StopReason, VersionSpan

REQUEST = GenerateRequest("r1", [5, 6, 7], SamplingParams(max_tokens=8), affinity="g")


def completion(token_ids=(11, 12, 2), logprobs=(-0.5, -1.0, -0.1), finish="stop", stop=None, versions=((0, 3, "4"),)):
    spans = None if versions is None else [SimpleNamespace(start=s, end=e, version=v) for s, e, v in versions]
    flat = None if logprobs is None else SimpleNamespace(logprobs=list(logprobs), token_ids=list(token_ids))
    return SimpleNamespace(
        token_ids=list(token_ids), logprobs=flat, finish_reason=finish, stop_reason=stop, weight_versions=spans
    )


def test_ids_and_logprobs_are_kept_as_sampled_case_73():
    generation = to_generation(REQUEST, completion(), budget=8)

    assert generation.token_ids == [11, 12, 2]
    assert generation.logprobs == [-0.5, -1.0, -0.1]
    assert generation.version_spans == [VersionSpan(0, 3, 4)]


@pytest.mark.parametrize(
    ("finish", "stop", "budget", "reason", "detail"),
    [
        ("stop", None, 8, StopReason.EOS, ""),  # the primary end-of-sequence token
        ("stop", 7, 8, StopReason.EOS, "7"),  # case 71: a secondary one is not a truncation
        ("stop", "###", 8, StopReason.STOP, "###"),
        ("length", None, 8, StopReason.LENGTH, ""),  # case 70
        ("length", None, 3, StopReason.CONTEXT_FULL, ""),  # the context allowed 3 of the 8
    ],
)
def test_stop_reasons_cases_70_to_72(finish, stop, budget, reason, detail):
    generation = to_generation(REQUEST, completion(finish=finish, stop=stop), budget)

    assert (generation.stop_reason, generation.stop_detail) == (reason, detail)
    assert generation.stop_reason.truncated == (finish == "length")
    assert generation.token_ids[-1] == 2  # what ended it stays


@pytest.mark.parametrize(
    "logprobs", [None, (), (-0.5, -1.0), (-0.5, float("nan"), -0.1), (-0.5, float("-inf"), -0.1), (0, 0, float("inf"))]
)
def test_a_missing_logprob_is_an_error_case_68(logprobs):
    with pytest.raises(GenerationError, match=r"request r1: .*log-prob"):
        to_generation(REQUEST, completion(logprobs=logprobs), budget=8)


def test_logprobs_of_other_tokens_are_an_error_case_68():
    output = completion()
    output.logprobs.token_ids = [11, 99, 2]

    with pytest.raises(GenerationError, match="log-probs"):
        to_generation(REQUEST, output, budget=8)


@pytest.mark.parametrize("finish", ["abort", "error", "repetition", None])
def test_an_aborted_request_is_an_error(finish):
    with pytest.raises(GenerationError, match=f"ended it with {finish!r}"):
        to_generation(REQUEST, completion(finish=finish), budget=8)


def test_spans_of_an_update_in_between_case_31():
    output = completion(versions=((0, 1, "4"), (1, 1, "5"), (1, 3, "6")))

    generation = to_generation(REQUEST, output, budget=8)

    assert generation.version_spans == [VersionSpan(0, 1, 4), VersionSpan(1, 3, 6)]


def test_an_unreported_version_is_never_guessed():
    with pytest.raises(GenerationError, match="which policy version"):
        to_generation(REQUEST, completion(versions=None), budget=8)


@pytest.mark.parametrize("versions", [(), ((0, 2, "4"),), ((1, 3, "4"),), ((0, 1, "4"), (2, 3, "5"))])
def test_spans_with_gaps_are_an_error(versions):
    with pytest.raises(GenerationError, match="do not cover 3 tokens"):
        to_generation(REQUEST, completion(versions=versions), budget=8)
