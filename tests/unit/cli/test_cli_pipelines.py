"""The line of ``rlhf config check`` that says what overlaps, and how old a token may be."""

import pytest
from minimal_config import config

from rlhf_cli.pipelines import in_words

ASYNC, LAG_2 = "train.async_enable=true", "train.async_queue_size=2"
FILLED = "rollout.vllm_generate_batch_size=192"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ((), "synchronous; every token is on-policy"),
        (("train.colocate_all=true",), "synchronous, on the same GPUs by turns; every token is on-policy"),
        ((FILLED,), "synchronous; groups that were left over are trained whatever their age"),
        ((FILLED, "rollout.max_age=1"), "synchronous; tokens are at most 1 version old"),
        ((ASYNC, LAG_2), "asynchronous; tokens are at most 2 versions old, corrected by tis"),
        (
            (ASYNC, "algo.advantage.is_correction_enable=false", "train.allow_uncorrected=true"),
            "asynchronous; tokens are at most 1 version old, and not corrected",
        ),
        (
            (ASYNC, "rollout.top_p=0.9", "train.allow_uncorrected=true"),
            "asynchronous; tokens are at most 1 version old, and not corrected",
        ),
        (
            (ASYNC, LAG_2, FILLED, "train.partial_rollout_enable=true", "train.partial_rollout_kv=keep"),
            "asynchronous; tokens are at most 2 versions old, corrected by tis; requests go on over a weight sync (KV cache: "
            "keep); what is unfinished when a batch is full goes on in the next",
        ),
        (
            (ASYNC, FILLED, "train.partial_rollout_enable=true"),
            "asynchronous; tokens are at most 1 version old, corrected by tis; requests go on over a weight sync (KV cache: "
            "recompute); what is unfinished when a batch is full mostly begins anew: raise train.async_queue_size",
        ),
        ((ASYNC, "replay.source=a"), "replay: nothing is sampled, iterations one after the other"),
    ],
)
def test_a_pipeline_in_words(overrides, line):
    assert in_words(config(*overrides)) == line
