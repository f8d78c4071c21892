from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import training_batches as tb

from rlhf_core.algorithms.logprobs import chunked_logprobs
from rlhf_core.training.model import TokenScores
from rlhf_core.training.objective import SUMS, filler_loss, micro_batch_loss


def loss_of(config, rows, logprobs_BT, entropy_BT=None, step=None, kl_coef=0.0, aux_loss=None, episode_tokens_B=None):
    entropy_BT = torch.zeros_like(logprobs_BT) if entropy_BT is None else entropy_BT
    scores = TokenScores(logprobs_BT, entropy_BT, aux_loss)
    step = step or tb.step_of(*rows)
    return micro_batch_loss(config, step, tb.batch_of(*rows), scores, kl_coef, episode_tokens_B)


def sums_of(part):
    return dict(zip(SUMS, part.sums.tolist(), strict=True))


def test_ppo_golden_row():
    """ALGORITHMS section 8: logp -1, eps .2/.27: token losses [-1.27, -.67032] and [1.349859, .8], mean .052385."""
    config = tb.config("actor.eps_clip_low_high=[0.2, 0.27]")
    rows = [tb.experience([-1.3, -0.6], advantage=1.0), tb.experience([-1.3, -0.6], advantage=-1.0)]

    part = loss_of(config, rows, tb.padded([-1, -1], [-1, -1]))

    assert part.loss.item() == pytest.approx(0.052385, abs=1e-6)
    assert sums_of(part)["clipped"] / sums_of(part)["tokens"] == 0.5
    assert sums_of(part)["approx_kl"] / sums_of(part)["tokens"] == pytest.approx(0.05, abs=1e-6)
    assert part.peaks["ratio"].item() == pytest.approx(1.349859, abs=1e-6)


@pytest.mark.parametrize("mode", ["token", "sample", "constant_length"])
def test_micro_batches_add_up_to_the_step(mode):
    """Padding differs between the micro-batches, and the entropy and KL terms are on."""
    config = tb.config(
        f"actor.loss_agg_mode={mode}", "actor.entropy_coef=0.1", "algo.kl.init_coef=0.1", "algo.kl.use_loss=true"
    )
    rows = [tb.experience([-1.0] * n, ref=[-2.0] * n, advantage=n) for n in (1, 4, 2)]
    logprobs = [[-0.9] * n for n in (1, 4, 2)]
    step = tb.step_of(*rows)

    whole = loss_of(config, rows, tb.padded(*logprobs), tb.padded(*logprobs), step, kl_coef=0.1)
    parts = [
        loss_of(config, [row], tb.padded(lp), tb.padded(lp), step, kl_coef=0.1)
        for row, lp in zip(rows, logprobs, strict=True)
    ]

    torch.testing.assert_close(sum(part.loss for part in parts), whole.loss)
    torch.testing.assert_close(sum(part.sums for part in parts), whole.sums)


def test_dr_grpo_divides_by_the_constant_length():
    config = tb.config("algo.advantage.estimator=dr_grpo", "rollout.max_new_tokens=10")

    part = loss_of(config, [tb.experience([-1.0, -1.0])], tb.padded([-1, -1]))

    assert part.loss.item() == pytest.approx(-2 / 10)


def test_correction_scales_token_losses_only_where_it_is_on():
    """w = exp(-1 - (-3)) = 7.39, clamped to 5: loss -5 instead of -1."""
    rows = [tb.experience([-1.0], rollout=[-3.0])]

    off = loss_of(tb.config(), rows, tb.padded([-1]))
    on = loss_of(tb.config("algo.advantage.is_correction_enable=true"), rows, tb.padded([-1]))

    assert (off.loss.item(), on.loss.item()) == (-1, -5)
    assert sums_of(off)["mismatch"] == sums_of(on)["mismatch"] == 2
    assert sums_of(on)["capped"] == 1


def test_constrained_row_is_kept_out_of_the_correction_and_of_its_statistics():
    config = tb.config("algo.advantage.is_correction_enable=true")

    part = loss_of(config, [tb.experience([-1.0], rollout=[-3.0], constrained=True)], tb.padded([-1]))

    assert part.loss.item() == -1
    assert (sums_of(part)["compared"], sums_of(part)["mismatch"]) == (0, 0)


def test_kl_is_measured_unscaled_and_enters_the_loss_only_as_a_loss():
    rows = [tb.experience([-1.0], ref=[-1.5], advantage=0.0)]
    as_loss = tb.config("algo.kl.init_coef=0.2", "algo.kl.use_loss=true")

    penalty = loss_of(tb.config("algo.kl.init_coef=0.2"), rows, tb.padded([-1]), kl_coef=0.2)
    loss = loss_of(as_loss, rows, tb.padded([-1]), kl_coef=0.2)

    assert penalty.loss.item() == 0
    assert loss.loss.item() == pytest.approx(0.2 * 0.5)
    assert sums_of(penalty)["kl"] == sums_of(loss)["kl"] == 0.5


def test_entropy_bonus_lowers_the_loss():
    rows = [tb.experience([-1.0, -1.0], advantage=0.0)]
    entropy_BT = tb.padded([1, 3])

    part = loss_of(tb.config("actor.entropy_coef=0.1"), rows, tb.padded([-1, -1]), entropy_BT)

    assert part.loss.item() == pytest.approx(-0.1 * 2)
    assert sums_of(part)["entropy"] == 4


@pytest.mark.golden
def test_case_66_entropy_bonus_of_the_sampled_distribution_has_a_gradient():
    """Temperature .7, coefficient .01, logits [2, 1, 0]."""
    weight = torch.tensor([[2.0], [1.0], [0.0]], requires_grad=True)
    hidden, target = torch.ones(1, 1), torch.zeros(1, dtype=torch.long)
    logprobs, entropy = chunked_logprobs(hidden, weight, None, target, 0.7, 8, want_entropy=True)
    row = tb.experience(logprobs.tolist(), advantage=0.0)

    part = loss_of(
        tb.config("actor.entropy_coef=0.01"),
        [row],
        *(torch.nn.functional.pad(values, (1, 0)).unsqueeze(0) for values in (logprobs, entropy)),
    )
    part.loss.backward()

    p = torch.softmax(torch.tensor([2.0, 1.0, 0.0]) / 0.7, 0)
    expected = -(p * p.log()).sum()
    assert part.loss.item() == pytest.approx(-0.01 * expected.item(), abs=1e-7)
    assert sums_of(part)["entropy"] == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(weight.grad[:, 0], 0.01 * p * (p.log() + expected) / 0.7, atol=1e-7, rtol=0)


def test_balancing_loss_of_the_step_is_a_mean_over_its_rows():
    """Micro-batches of one and of three rows, balancing losses 2 and 4: (2 + 3 × 4) / 4."""
    config = tb.config("actor.aux_loss_coef=0.1")
    rows = [tb.experience([-1.0] * n, advantage=0.0) for n in (3, 1, 1, 1)]
    step, aux_losses = tb.step_of(*rows), torch.tensor([2.0, 4.0], requires_grad=True)

    parts = [
        loss_of(config, part, tb.padded(*[[-1.0] * row.num_actions for row in part]), step=step, aux_loss=aux_loss)
        for part, aux_loss in zip((rows[:1], rows[1:]), aux_losses, strict=True)
    ]
    total = sum(part.loss for part in parts)
    total.backward()

    assert total.item() == pytest.approx(0.1 * 3.5)
    assert sum(sums_of(part)["aux_loss"] for part in parts) == 3.5
    torch.testing.assert_close(aux_losses.grad, torch.tensor([0.1 / 4, 0.1 * 3 / 4]))


def test_update_that_wants_a_balancing_loss_does_not_go_on_without_one():
    with pytest.raises(AssertionError, match="balancing loss"):
        loss_of(tb.config("actor.aux_loss_coef=0.1"), [tb.experience([-1.0])], tb.padded([-1]))


def test_unknown_numbers_in_the_padding_do_not_count():
    rows = [tb.experience([-1.0, -1.0]), tb.experience([-1.0])]
    logprobs_BT = tb.padded([-1, -1], [-1])
    with torch.no_grad():
        logprobs_BT[1, 2] = math.nan

    assert loss_of(tb.config(), rows, logprobs_BT).loss.item() == -1


def test_filler_has_a_graph_and_adds_nothing():
    logprobs_BT = tb.padded([-1, -2])

    part = filler_loss(TokenScores(logprobs_BT, None))
    part.loss.backward()

    assert part.loss.item() == 0
    assert not part.sums.any()
    assert part.peaks.keys() == loss_of(tb.config(), [tb.experience([-1.0])], tb.padded([-1])).peaks.keys()
    assert not logprobs_BT.grad.any()


def test_filler_keeps_the_routers_in_the_graph():
    aux_loss = torch.tensor(2.0, requires_grad=True)

    part = filler_loss(TokenScores(tb.padded([-1]), None, aux_loss))
    part.loss.backward()

    assert part.loss.item() == 0
    assert aux_loss.grad.item() == 0


@pytest.mark.parametrize("mode", ["token", "sample", "constant_length"])
def test_segments_of_an_episode_weigh_as_the_episode(mode):
    """Five tokens in one row, and in two rows that are in different micro-batches; another episode beside them."""
    config = tb.config(f"actor.loss_agg_mode={mode}")
    whole = [tb.experience([-1.0] * 5, advantage=2.0), tb.experience([-1.0] * 2, advantage=1.0)]
    parts = [tb.experience([-1.0] * n, advantage=a) for n, a in ((3, 2.0), (2, 2.0), (2, 1.0))]
    logprobs = [[-0.9, -0.8, -0.7, -0.6, -0.5], [-0.9] * 2]
    split = [logprobs[0][:3], logprobs[0][3:], logprobs[1]]
    step = dataclasses.replace(tb.step_of(*parts), num_sequences=2)

    one = loss_of(config, whole, tb.padded(*logprobs))
    two = [
        loss_of(config, [row], tb.padded(said), step=step, episode_tokens_B=torch.tensor([tokens]))
        for row, said, tokens in zip(parts, split, (5, 5, 2), strict=True)
    ]

    torch.testing.assert_close(sum(part.loss for part in two), one.loss)


NOW, SAID = [-1.0, -2.0, -0.5], [-1.2, -4.5, -0.4]


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("kind", ["tis", "icepop", "seq-mask-tis"])
def test_without_old_logprobs_those_of_this_pass_are_they(loss, kind):
    """Engine and trainer disagree: the weights of both signs of the advantage, and a reference."""
    config = tb.config(
        f"actor.policy_loss_type={loss}",
        f"algo.advantage.is_correction_type={kind}",
        "algo.advantage.is_correction_enable=true",
        "actor.eps_clip_low_high=[0.2, 0.3]",
        "actor.dual_clip=3",
        "algo.kl.init_coef=0.1",
        "algo.kl.use_loss=true",
    )
    known = [tb.experience(NOW, rollout=SAID, ref=SAID, advantage=a) for a in (1.0, -2.0)]
    unknown = [dataclasses.replace(row, old_logprobs=None) for row in known]
    found = []
    for rows in (known, unknown):
        logprobs_BT = tb.padded(NOW, NOW)
        part = loss_of(config, rows, logprobs_BT, kl_coef=0.1)
        part.loss.backward()
        found.append((part.loss, part.sums, part.peaks, logprobs_BT.grad))

    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=0)
    assert found[1][3].any()


def test_how_far_engine_and_trainer_are_apart_is_summed_over_all_action_tokens():
    """log w = ln 2 and -ln 4, in a row that the correction leaves alone."""
    row = tb.experience([-1.0, -1.0], rollout=[-1.0 - math.log(2), -1.0 + math.log(4)], constrained=True)

    part = loss_of(tb.config(), [row], tb.padded([-1, -1]))

    sums = sums_of(part)
    assert (sums["tokens"], sums["compared"]) == (2, 0)
    assert sums["log_weight_abs"] == pytest.approx(math.log(8))
    assert (sums["weight"], sums["weight_squared"]) == pytest.approx((2.25, 4.0625))
    assert part.peaks["log_weight_abs"].item() == pytest.approx(math.log(4))
