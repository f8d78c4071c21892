"""What vLLM's engine core sends of a rollout, and when: vLLM's own rows, no engine."""

import queue
from types import SimpleNamespace

import numpy as np
import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists

from rlhf_core.generation.withheld import TOKENS, Withheld, withhold


def asked(kind=RequestOutputKind.FINAL_ONLY, detokenize=False, client=0, **sampling):
    params = SamplingParams(logprobs=0, output_kind=kind, detokenize=detokenize, **sampling)
    return SimpleNamespace(sampling_params=params, client_index=client)


def row(name, token, finish=None, **more):
    logprobs = LogprobsLists(np.array([[token]]), np.array([[-token / 8]], np.float32), np.array([1]), None)
    return EngineCoreOutput(name, [token], finish_reason=finish, new_logprobs=logprobs, **more)


class Steps:
    """Steps of one core, and what would be sent after each."""

    def __init__(self, **requests):
        self.requests = requests
        self.withheld = Withheld()

    def step(self, *rows, client=0, **more):
        messages = {client: EngineCoreOutputs(outputs=list(rows), **more)} if rows or more else {}
        self.withheld.hold(messages, self.requests)
        return messages

    def sent(self, *rows):
        messages = self.step(*rows)
        return messages[0].outputs if messages else []


def logprobs_of(sent):
    return sent.new_logprobs.logprobs[:, 0].tolist()


def test_a_request_is_sent_once_it_ends():
    steps = Steps(a=asked(), b=asked())

    assert steps.step(row("a", 1, prefill_stats=PrefillStats()), row("b", 4)) == {}
    assert steps.step(row("a", 2), row("b", 5)) == {}
    [a] = steps.sent(row("a", 3, FinishReason.LENGTH), row("b", 6))
    [b] = steps.sent(row("b", 7, FinishReason.STOP, stop_reason=7))

    assert (a.new_token_ids, a.finish_reason, logprobs_of(a)) == (
        [1, 2, 3],
        FinishReason.LENGTH,
        [-1 / 8, -2 / 8, -3 / 8],
    )
    assert a.prefill_stats is not None
    assert (b.new_token_ids, b.finish_reason, b.stop_reason) == ([4, 5, 6, 7], FinishReason.STOP, 7)
    assert b.new_logprobs.logprob_token_ids[:, 0].tolist() == b.new_token_ids
    assert b.new_logprobs.sampled_token_ranks.tolist() == [1] * 4


def test_a_long_one_is_sent_in_pieces():
    steps = Steps(a=asked())

    sent = [part for token in range(3 * TOKENS) for part in steps.sent(row("a", token))]

    assert [len(part.new_token_ids) for part in sent] == [TOKENS] * 3
    assert [token for part in sent for token in part.new_token_ids] == list(range(3 * TOKENS))


@pytest.mark.parametrize(
    "request_",
    [
        asked(RequestOutputKind.DELTA),
        asked(RequestOutputKind.CUMULATIVE),
        asked(detokenize=True, stop=["x"]),  # the other process looks for the stop string
        asked(prompt_logprobs=1),
    ],
)
def test_what_somebody_reads_along_goes_at_once(request_):
    steps = Steps(a=request_, b=asked())

    first, second = row("a", 1), row("a", 2)

    assert steps.sent(first, row("b", 1)) == [first]
    assert steps.sent(second, row("b", 2)) == [second]
    assert second.new_token_ids == [2]


def test_one_token_or_none_is_sent_as_it_is():
    only, failed = row("a", 1, FinishReason.STOP), EngineCoreOutput("b", [], finish_reason=FinishReason.ERROR)

    assert Steps().sent(only, failed) == [only, failed]  # finished: the scheduler has let go of both


def test_a_request_that_fails_in_the_middle_ends_with_what_it_said():
    steps = Steps(a=asked())
    steps.sent(row("a", 1))

    [sent] = steps.sent(EngineCoreOutput("a", [], finish_reason=FinishReason.ERROR))

    assert (sent.new_token_ids, sent.finish_reason, logprobs_of(sent)) == ([1], FinishReason.ERROR, [-1 / 8])


def test_statistics_are_not_held_back():
    steps = Steps(a=asked())

    sent = steps.step(row("a", 1), scheduler_stats=SchedulerStats(num_running_reqs=1))

    assert sent[0].outputs == []
    assert sent[0].scheduler_stats.num_running_reqs == 1


def test_aborted_ones_are_forgotten():
    steps = Steps(a=asked(), b=asked())
    steps.sent(row("a", 1), row("b", 1))
    del steps.requests["a"]

    steps.sent(row("b", 2))

    assert steps.withheld.release(steps.requests)[0][0].request_id == "b"
    assert steps.withheld.release(steps.requests) == {}


class Core(EngineCoreProc):
    """The part of vLLM's that stamps what is sent."""

    def __init__(self, **requests):
        self._weight_version = "3"
        self.output_queue = queue.Queue()
        self.scheduler = SimpleNamespace(requests=requests)

    def step(self, *rows, client=0):
        messages = {client: EngineCoreOutputs(outputs=list(rows))}
        self._attach_weight_version(messages)
        return messages


def test_every_token_goes_under_the_version_that_spoke_it():
    withhold()
    core = Core(a=asked(), b=asked(client=1))
    core.step(row("a", 1))
    core.step(row("b", 2), client=1)

    core.set_weight_version("4")
    then = core.step(row("a", 5, FinishReason.LENGTH))[0]

    sent = dict(core.output_queue.get_nowait() for _ in range(2))
    assert {c: (m.weight_version, [r.new_token_ids for r in m.outputs]) for c, m in sent.items()} == {
        0: ("3", [[1]]),
        1: ("3", [[2]]),
    }
    assert (then.weight_version, then.outputs[0].new_token_ids) == ("4", [5])
    assert core.output_queue.empty()


def test_the_engine_in_this_process_is_left_alone():
    """It has no queue on which anything could be sent later."""
    withhold()

    assert EngineCore._attach_weight_version is not EngineCoreProc._attach_weight_version
    assert EngineCore.set_weight_version is not EngineCoreProc.set_weight_version
