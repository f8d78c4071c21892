"""One prompt, one answer, token by token."""

import numpy as np
import pytest
from agent_script import Letters, Scripted, answer, episode, numbers

from rlhf_core.agents import SingleTurnAgentExecutor
from rlhf_core.errors import GenerationError
from rlhf_core.records import ActionRange, ImageRef, Prompt, SamplingParams, StopReason, VersionSpan, action_mask


async def played(generate, **changes):
    [row] = await SingleTurnAgentExecutor().execute(episode(generate, **changes))
    return row


async def test_the_example_of_the_records():
    """records/trajectory.py: prompt of 3 tokens, answer of 2 (the last one EOS), spoken by policy version 7."""
    row = await played(Scripted())

    assert row.token_ids.tolist() == [11, 12, 13, 40, 2]
    assert row.token_ids.dtype == np.int32
    assert row.action_ranges == (ActionRange(3, 5),)
    assert numbers(row.rollout_logprobs) == [0, 0, 0, -1.2, -0.1]
    assert row.rollout_logprobs.dtype == np.float32
    assert row.version_spans == (VersionSpan(3, 5, 7),)
    assert row.step_rewards == ()
    assert row.stop_reason is StopReason.EOS
    assert row.answer == "("  # the decoded 40, without EOS


async def test_the_row_says_where_it_comes_from():
    row = await played(Scripted(), group="g5", sample=2, round=1)

    assert (row.run_id, row.iteration, row.round) == ("run", 3, 1)
    assert (row.key, row.prompt_id, row.datasource) == (("g5", 2, 0), "row-g5", "sums")
    assert (row.prompt, row.label, row.reward, row.failed) == ("1 + 1 =", 2, None, False)


async def test_the_request_says_what_to_sample():
    image = ImageRef("0" * 64, "images/0.png", 0, 1)
    generate = Scripted()

    await played(generate, prompt=Prompt("r", "s", "t", [1, 2], images=(image,)), group="g5", sample=2)

    [request] = generate.requests
    assert request.prompt_token_ids == [1, 2]
    assert request.sampling == SamplingParams(max_tokens=8, seed=102)
    assert (request.affinity, request.request_id, request.images) == ("g5", "3-0-g5-2", (image,))


async def test_tokens_of_two_policy_versions():
    """CASE 31: paused after 3 tokens, updated, resumed to 8."""
    script = Scripted(lambda r: answer(r, range(8), [-1.0] * 8, [(0, 3, 0), (3, 8, 1)], StopReason.LENGTH))

    row = await played(script)

    assert row.version_spans == (VersionSpan(3, 6, 0), VersionSpan(6, 11, 1))
    assert row.oldest_version == 0


async def test_an_answer_cut_at_the_limit():
    """CASE 70: no EOS at the limit: exactly the sampled tokens are trained, and the row is truncated."""
    script = Scripted(lambda r: answer(r, [2, 5, 2, 9], [-1.0] * 4, [(0, 4, 7)], StopReason.LENGTH))

    row = await played(script)

    assert action_mask(row.action_ranges, len(row.token_ids)).tolist() == [False] * 3 + [True] * 4
    assert row.stop_reason.truncated


async def test_ids_are_kept_as_the_engine_said_them():
    """CASE 73: "he" + "llo" stay two ids, though one id would decode to the same."""
    script = Scripted(lambda r: answer(r, [72, 69], [-1.0, -1.0], [(0, 2, 7)]))

    row = await played(script)

    assert row.token_ids[3:].tolist() == [72, 69]
    assert len(row.rollout_logprobs) == len(row.token_ids) == row.action_ranges[-1].end


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"logprobs": (-1.2,)}, "1 log-probs for 2 tokens"),  # CASE 68
        ({"logprobs": ()}, "0 log-probs for 2 tokens"),
        ({"logprobs": (-1.2, None)}, "log-prob of token 1 is None"),
        ({"logprobs": (-1.2, float("nan"))}, "log-prob of token 1 is nan"),
        ({"logprobs": (float("-inf"), -0.1)}, "log-prob of token 0 is -inf"),
        ({"tokens": (), "logprobs": (), "spans": ()}, "returned no token"),
        ({"spans": ((0, 1, 7),)}, "policy versions cover 1 of 2 tokens"),
        ({"spans": ()}, "policy versions cover 0 of 2 tokens"),
    ],
)
async def test_whatever_is_missing_is_an_error_of_the_sample(changes, problem):
    with pytest.raises(GenerationError, match=rf"request 3-0-g0-0: .*{problem}"):
        await played(Scripted(lambda r: answer(r, **changes)))


async def test_an_engine_error_reaches_the_caller():
    with pytest.raises(GenerationError, match="refused"):
        await played(Scripted(lambda r: GenerationError("refused")))


def test_letters_skip_special_ids():
    assert Letters().decode([72, 2, 105], skip_special_tokens=True) == "Hi"
