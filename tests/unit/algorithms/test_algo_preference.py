import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor

from rlhf_core.algorithms.aggregation import aggregate
from rlhf_core.algorithms.preference import (
    DirectInput,
    PairLogprobs,
    bradley_terry_loss,
    chosen_nll,
    direct_preference_loss,
    dpo_loss,
    ipo_loss,
)
from rlhf_core.errors import ConfigError

NAN = float("nan")


def log_sigmoid(x):
    return -np.logaddexp(0, -x)


def pairs_of(chosen, rejected, ref_chosen, ref_rejected):
    return PairLogprobs(*(tensor(x, dtype=torch.float64) for x in (chosen, rejected, ref_chosen, ref_rejected)))


# One pair: log-ratios 1 and -2, so h = 3.
PAIR = pairs_of([-4.0], [-9.0], [-5.0], [-7.0])


@pytest.mark.golden
@pytest.mark.parametrize(
    ("beta", "smoothing", "expected"),
    [(0.1, 0.0, 0.554355), (0.1, 0.1, 0.584355), (0.5, 0.0, 0.201413), (0.5, 0.2, 0.501413)],
)
def test_dpo(beta, smoothing, expected):
    """-log sigmoid(.3) = .554355; smoothing adds e · beta · h."""
    out = dpo_loss(PAIR, beta, smoothing)

    assert out.loss_B.item() == pytest.approx(expected, abs=1e-6)
    assert (out.chosen_B.item(), out.rejected_B.item()) == pytest.approx((beta * 1, beta * -2))
    assert out.margin_B.item() == pytest.approx(beta * 3)
    assert out.correct_B.tolist() == [True]


@pytest.mark.golden
@pytest.mark.parametrize(("beta", "expected"), [(0.1, 4.0), (0.5, 4.0), (0.25, 1.0)])
def test_ipo(beta, expected):
    """(3 - 1 / (2 beta))²: targets 5, 1 and 2."""
    assert ipo_loss(PAIR, beta).loss_B.item() == pytest.approx(expected)


@pytest.mark.golden
@pytest.mark.parametrize(
    ("margin", "center", "expected"),
    [(None, 0.0, 0.201413), (1.0, 0.0, 0.474077), (None, 0.01, 0.211413), (1.0, 0.1, 0.574077)],
)
def test_bradley_terry(margin, center, expected):
    """Scores 1.25 and -.25: -log sigmoid(1.5) = .201413, sum 1."""
    margin_B = None if margin is None else tensor([margin])

    out = bradley_terry_loss(tensor([1.25]), tensor([-0.25]), margin_B, center)

    assert out.loss_B.item() == pytest.approx(expected, abs=1e-6)
    assert (out.chosen_B.item(), out.rejected_B.item(), out.correct_B.item()) == (1.25, -0.25, True)


numbers = st.lists(st.floats(-30, 30), min_size=4, max_size=4)


@pytest.mark.golden
@given(st.lists(numbers, min_size=1, max_size=5), st.floats(0.01, 2), st.floats(0, 0.49), st.floats(0, 1))
def test_losses_are_those_of_plain_numpy(rows, beta, smoothing, center):
    table = np.array(rows).T
    chosen, rejected, ref_chosen, ref_rejected = table
    h = (chosen - ref_chosen) - (rejected - ref_rejected)
    pairs = pairs_of(*table)

    dpo = dpo_loss(pairs, beta, smoothing).loss_B.numpy()
    ipo = ipo_loss(pairs, beta).loss_B.numpy()
    ranked = bradley_terry_loss(pairs.chosen_B, pairs.rejected_B, pairs.ref_chosen_B.float(), center).loss_B.numpy()

    expected = -(1 - smoothing) * log_sigmoid(beta * h) - smoothing * log_sigmoid(-beta * h)
    np.testing.assert_allclose(dpo, expected, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(ipo, (h - 1 / (2 * beta)) ** 2, rtol=1e-6, atol=1e-9)
    expected = -log_sigmoid(chosen - rejected - ref_chosen) + center * (chosen + rejected) ** 2
    np.testing.assert_allclose(ranked, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.golden
def test_dpo_adds_log_probs_over_an_answer_and_ipo_averages_them():
    """Answers of 2 and 4 tokens, log-ratios 1.5 and -.5 a token: sums 3 and -2, means 1.5 and -.5."""
    ref = tensor([[-3.0] * 4, [-1.0] * 4])
    logprobs = ref + tensor([[1.5] * 4, [-0.5] * 4])
    mask = tensor([[False, False, True, True], [True] * 4])

    dpo = direct_preference_loss(DirectInput(logprobs, ref, mask, loss="dpo", beta=1.0))
    ipo = direct_preference_loss(DirectInput(logprobs, ref, mask, loss="ipo", beta=0.25))

    assert dpo.margin_B.item() == pytest.approx(5)
    assert dpo.loss_B.item() == pytest.approx(math.log1p(math.exp(-5)), rel=1e-5)
    assert ipo.margin_B.item() == pytest.approx(0.25 * 2)
    assert ipo.loss_B.item() == pytest.approx(0, abs=1e-9)


def test_likelihood_of_the_chosen_answer_is_added_by_its_weight():
    logprobs = tensor([[-1.0, -2.0, NAN], [-5.0, NAN, NAN]])
    mask = tensor([[True, True, False], [True, False, False]])

    plain, added = (
        direct_preference_loss(DirectInput(logprobs, logprobs, mask, loss="dpo", beta=1.0, nll_coef=coef))
        for coef in (0.0, 0.2)
    )

    assert chosen_nll(logprobs, mask).tolist() == [1.5]
    assert (added.loss_B - plain.loss_B).item() == pytest.approx(0.2 * 1.5)


@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_case_53_nothing_outside_the_answers_reaches_loss_or_gradient(loss):
    """The second pair has no answer tokens at all."""
    logprobs = tensor([[-1.0, NAN], [NAN, NAN], [-2.0, NAN], [NAN, NAN]], requires_grad=True)
    mask = tensor([[True, False], [False, False]] * 2)

    out = direct_preference_loss(
        DirectInput(logprobs, tensor([[-1.0, NAN]] * 4), mask, loss=loss, beta=0.4, nll_coef=0.1)
    )
    out.loss_B.sum().backward()

    assert out.loss_B.isfinite().all()
    assert (logprobs.grad != 0).tolist() == [[True, False], [False, False]] * 2


def test_first_step_of_dpo_pulls_the_answers_apart_by_half_of_beta():
    """Policy and reference are equal: d loss / d log-prob = ∓ beta sigmoid(0)."""
    logprobs = torch.full((2, 3), -1.0, requires_grad=True)

    out = direct_preference_loss(
        DirectInput(logprobs, logprobs.detach(), torch.ones(2, 3, dtype=torch.bool), loss="dpo", beta=0.2)
    )
    out.loss_B.sum().backward()

    assert logprobs.grad.tolist() == [pytest.approx([-0.1] * 3), pytest.approx([0.1] * 3)]
    assert out.loss_B.item() == pytest.approx(math.log(2))
    assert out.correct_B.tolist() == [False]  # a tie


def test_smoothed_loss_is_least_where_the_model_doubts_as_much():
    """cDPO: sigmoid(beta h) = 1 - e, so the gradient vanishes at h = log((1 - e) / e) / beta."""
    h = math.log(0.9 / 0.1) / 0.5
    chosen = tensor([h], requires_grad=True)

    dpo_loss(PairLogprobs(chosen, tensor([0.0]), tensor([0.0]), tensor([0.0])), 0.5, 0.1).loss_B.sum().backward()

    assert chosen.grad.item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_huge_gaps_stay_finite(gap):
    chosen = tensor([gap], requires_grad=True)
    zero = tensor([0.0])

    loss = bradley_terry_loss(chosen, zero).loss_B + dpo_loss(PairLogprobs(chosen, zero, zero, zero), 1.0, 0.1).loss_B
    loss.sum().backward()

    assert loss.isfinite().all()
    assert chosen.grad.isfinite().all()


def test_half_precision_scores_are_compared_in_single():
    out = bradley_terry_loss(tensor([1.0], dtype=torch.bfloat16), tensor([0.0], dtype=torch.bfloat16))

    assert out.loss_B.dtype == torch.float32


@pytest.mark.golden
@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_case_55_gradient_does_not_depend_on_how_pairs_are_cut(loss):
    """8 pairs of answers of 1 to 4 tokens under a linear model: 1 × 8, 4 × 2 and 8 × 1."""
    torch.manual_seed(0)
    features, ref = torch.randn(2, 8, 4, 3), torch.randn(2, 8, 4)
    mask = torch.arange(4) < (torch.arange(8) % 4 + 1).unsqueeze(1)

    def gradient(size):
        weight = torch.full((3,), 0.1, requires_grad=True)
        for start in range(0, 8, size):
            rows = slice(start, start + size)
            logprobs = (features[:, rows] @ weight).flatten(0, 1)
            inputs = DirectInput(logprobs, ref[:, rows].flatten(0, 1), mask[rows].repeat(2, 1), loss, 0.3, nll_coef=0.1)
            (direct_preference_loss(inputs).loss_B.sum() / 8).backward()
        return weight.grad

    assert gradient(8).abs().max() > 1e-3
    for size in (1, 2):
        torch.testing.assert_close(gradient(size), gradient(8), atol=1e-6, rtol=0)


@pytest.mark.golden
@pytest.mark.parametrize(("mode", "expected"), [("token", 3.0), ("sample", 2.75)])
def test_sft_loss_is_the_negative_log_likelihood_under_the_aggregation(mode, expected):
    logprobs, mask = tensor([[-1.0, -2, NAN], [-3, -4, -5]]), tensor([[True, True, False], [True] * 3])

    assert aggregate(-logprobs, mask, mode, num_tokens=5, num_sequences=2).item() == expected


def test_unknown_loss_is_refused():
    zeros = torch.zeros(2, 1)

    with pytest.raises(ConfigError, match="unknown dpo.loss='kto': choose dpo or ipo"):
        direct_preference_loss(DirectInput(zeros, zeros, zeros.bool(), loss="kto", beta=0.1))
