import math

import pytest
import torch
from torch import tensor

from rlhf_core.algorithms.corrections import CorrectionInput, Mismatch, correct
from rlhf_core.errors import ConfigError

OLD, ROLLOUT = tensor([[-1.0, -1, -1]]), tensor([[-1.1, -3, -0.1]])  # w = 1.105171, 7.389056, .40657
KINDS = ["tis", "icepop", "seq-mask-tis"]


def correction(kind, old=OLD, rollout=ROLLOUT, mask=None, low=0.5, high=5.0, **rest):
    mask = torch.ones_like(old, dtype=torch.bool) if mask is None else mask
    return correct(CorrectionInput(old, rollout, mask, low, high, **rest), kind)


@pytest.mark.golden
@pytest.mark.parametrize(
    ("kind", "expected", "capped", "dropped"),
    [
        ("tis", [1.105171, 5, 0.5], 2, 0),
        ("icepop", [1.105171, 0, 0], 0, 2),
        ("seq-mask-tis", [1.105171, 5, 0.5], 2, 0),  # geometric mean 1.491825: kept
    ],
)
def test_factors(kind, expected, capped, dropped):
    out = correction(kind)

    assert out.factor_BT[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert (out.num_tokens.item(), out.capped_sum.item(), out.dropped_sum.item()) == (3, capped, dropped)


@pytest.mark.golden
@pytest.mark.parametrize(("high", "kept"), [(1.4918, False), (1.4919, True)])
def test_sequence_mean_is_geometric(high, kept):
    """1.491825 is the geometric mean of the three weights."""
    out = correction("seq-mask-tis", high=high)

    assert bool(out.factor_BT.any()) is kept
    assert out.dropped_sum.item() == (0 if kept else 3)


def test_mismatch_is_reported_as_sums():
    out = correction("tis")

    assert out.mismatch_sum.item() == pytest.approx(0.1 + 2 + 0.9, abs=1e-6)
    assert out.kl_sum.item() == pytest.approx(-0.1 - 2 + 0.9, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rollout", [-math.inf, math.inf])
def test_case_54_infinite_rollout_logprob_gives_a_finite_factor(kind, rollout):
    """The second row is the broken one."""
    out = correction(kind, old=tensor([[-1.0], [-1.0]]), rollout=tensor([[-1.0], [rollout]]))

    assert out.factor_BT.isfinite().all()
    assert out.mismatch_sum.item() == 20
    assert out.factor_BT[0].item() == 1


@pytest.mark.parametrize("kind", KINDS)
def test_constrained_rows_are_left_out(kind):
    out = correction(kind, OLD.expand(2, 3), ROLLOUT.expand(2, 3), constrained_B=tensor([True, False]))

    assert out.factor_BT[0].tolist() == [1, 1, 1]
    assert out.factor_BT[1].tolist() == correction(kind).factor_BT[0].tolist()
    assert out.num_tokens.item() == 3


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_outside_the_mask_do_not_count(kind):
    mask = tensor([[True, False], [False, False]])
    rollout = tensor([[-1.0, float("nan")], [-9.0, 0.0]])

    out = correction(kind, old=torch.full((2, 2), -1.0), rollout=rollout, mask=mask)

    assert out.factor_BT.tolist() == [[1, 1], [1, 1]]
    assert out.mismatch_sum.item() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_factors_carry_no_gradient(kind):
    assert not correction(kind, old=OLD.clone().requires_grad_()).factor_BT.requires_grad


def test_unknown_correction():
    with pytest.raises(ConfigError, match="unknown correction 'seq_mask_tis'"):
        correction("seq_mask_tis")


def test_the_effective_share_of_samples():
    """Weights 1 and 3: (1 + 3)² / (2 · (1 + 9)) = 0.8."""
    assert Mismatch.of(tensor([0.0, math.log(3)])).effective_share == pytest.approx(0.8)
    assert Mismatch.of(tensor([-1.0, -1.0, -1.0])).effective_share == pytest.approx(1.0)
    assert Mismatch.of(tensor([0.0, 1000.0])).effective_share == pytest.approx(0.5)  # finite
