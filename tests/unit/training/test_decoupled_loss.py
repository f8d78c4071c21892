"""A sample that lived through a weight sync, in the update of iteration 1: decoupled PPO (AReaL, arXiv:2505.24298).

::

    token    version    log p, engine    log p, version 1    w
    0        0          -3.0             -1.0                e^2 = 7.389
    1        1          -0.7             -0.7                1

The ratio of the loss is that of the trained policy to version 1; who spoke only enters through w. Before the first step the
ratio is 1, so with advantage 1 the gradient of a token is -w / 2: 2 tokens, aggregated by their mean.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import training_batches as tb

from rlhf_core.records import ActionRange
from rlhf_core.training.model import TokenScores
from rlhf_core.training.objective import micro_batch_loss

OLD, ENGINE = [-1.0, -0.7], [-3.0, -0.7]
ASYNC = ("train.async_enable=true", "actor.loss_agg_mode=token")
# kind -> factor of token 0, of which 5 is the most; the mean of the row, e^1, is in the range
KINDS = {"tis": 5.0, "icepop": 0.0, "seq-mask-tis": 5.0}


def gradient(*overrides, row=None, now=OLD):
    """d loss / d log p of the two tokens."""
    row = row or tb.experience(OLD, rollout=ENGINE)
    logprobs_BT = tb.padded(now)
    scores = TokenScores(logprobs_BT, torch.zeros_like(logprobs_BT))
    config = tb.config(*ASYNC, *overrides)
    micro_batch_loss(config, tb.step_of(row), tb.batch_of(row), scores, 0.0).loss.backward()
    return logprobs_BT.grad[0, 1:].tolist()


@pytest.mark.golden
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", ["ppo", "cispo"])
def test_a_token_is_weighed_by_how_much_likelier_it_has_become(loss, kind):
    found = gradient(f"actor.policy_loss_type={loss}", f"algo.advantage.is_correction_type={kind}")

    assert found == pytest.approx([-KINDS[kind] / 2, -1 / 2])


@pytest.mark.golden
@pytest.mark.parametrize("kind", KINDS)
def test_with_one_ratio_for_the_row_the_weights_are_those_of_the_row_too(kind):
    """gspo: each token's gradient is that of the mean log-ratio, times the mean of the weights."""
    found = gradient("actor.policy_loss_type=gspo", f"algo.advantage.is_correction_type={kind}")

    assert found == pytest.approx([-(KINDS[kind] + 1) / 2 / 2] * 2)


def test_the_clip_is_around_the_recomputed_policy_not_around_the_one_that_spoke():
    """Token 0 is e^2.1 times likelier than when it was spoken, and only e^.1 times likelier than before this update."""
    inside, outside = gradient(now=[-0.9, -0.7]), gradient(now=[-0.5, -0.7])

    assert inside[0] == pytest.approx(-5 * 1.105171 / 2, rel=1e-5)
    assert outside[0] == 0  # e^.5 > 1.2


def test_the_correction_is_on_where_older_versions_may_speak_and_can_be_turned_off():
    uncorrected = ("algo.advantage.is_correction_enable=false", "train.allow_uncorrected=true")

    assert gradient()[0] == -2.5
    assert gradient("train.async_queue_size=0")[0] == -0.5
    assert gradient(*uncorrected)[0] == -0.5


def test_a_row_of_renormalised_logprobs_cannot_be_weighed():
    assert gradient(row=tb.experience(OLD, rollout=ENGINE, constrained=True)) == [-0.5, -0.5]


def test_what_is_left_out_is_context_and_not_counted():
    """``train.partial_rollout_mask_old``: of both tokens only the second is trained, and the mean is over one."""
    row = replace(tb.experience(OLD, rollout=ENGINE), action_ranges=(ActionRange(2, 3),))

    assert gradient(row=row) == [0.0, -1.0]
