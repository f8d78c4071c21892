import pytest
import torch
from torch import tensor

from rlhf_core.algorithms.aggregation import aggregate, count_targets, masked_mean
from rlhf_core.algorithms.losses import POLICY_LOSSES, LossInput
from rlhf_core.errors import ConfigError

LOSSES = tensor([[1.0, 2, 0], [3, 4, 5]])
MASK = tensor([[True, True, False], [True, True, True]])
MODES = ["token", "sample", "constant_length"]


def total(loss, mask, mode, length=3, **rest):
    tokens, sequences = count_targets(mask)
    return aggregate(loss, mask, mode, num_tokens=tokens, num_sequences=sequences, length=length, **rest)


@pytest.mark.golden
@pytest.mark.parametrize(("mode", "expected"), [("token", 3.0), ("sample", 2.75), ("constant_length", 2.5)])
def test_modes(mode, expected):
    assert total(LOSSES, MASK, mode).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.golden
def test_masked_mean_of_a_row_without_actions_is_zero():
    mean = masked_mean(tensor([[float("nan"), 7.0], [1.0, 3.0]]), tensor([[False, False], [True, True]]))

    assert mean.tolist() == [0, 2]


def test_targets_are_counted_without_empty_rows():
    assert count_targets(tensor([[True, True], [False, False], [True, False]])) == (3, 2)


@pytest.mark.golden
@pytest.mark.parametrize("mode", MODES)
def test_case_53_row_without_actions_changes_nothing(mode):
    """Finite, and the loss of the other row alone."""
    loss, mask = tensor([[1.0, 2.0], [float("nan"), float("inf")]]), tensor([[True, True], [False, False]])

    assert total(loss, mask, mode).item() == total(loss[:1], mask[:1], mode).item()


@pytest.mark.parametrize("mode", MODES)
def test_case_47_a_rank_without_tokens_still_has_a_graph(mode):
    loss = torch.zeros(1, 2, requires_grad=True)

    total(loss, torch.zeros(1, 2, dtype=torch.bool), mode).backward()

    assert loss.grad.tolist() == [[0, 0]]


@pytest.mark.parametrize("mode", MODES)
def test_row_weights(mode):
    doubled, only_second = tensor([2.0, 2.0]), tensor([0.0, 1.0])

    assert total(LOSSES, MASK, mode, row_weight_B=doubled) == 2 * total(LOSSES, MASK, mode)
    assert total(LOSSES, MASK, mode, row_weight_B=only_second) == total(LOSSES * tensor([[0.0], [1.0]]), MASK, mode)


def test_unknown_mode():
    with pytest.raises(ConfigError, match=r"unknown actor\.loss_agg_mode='mean'"):
        total(LOSSES, MASK, "mean")


def test_constant_length_needs_a_length():
    with pytest.raises(ConfigError, match=r"set algo\.dr_grpo_length"):
        total(LOSSES, MASK, "constant_length", length=None)


def gradient(shards, mode, loss):
    """Gradient of a linear model over 8 rows of 1 … 8 action tokens; ``shards``: micro-batches of rows."""
    torch.manual_seed(0)
    features, old, advantages = torch.randn(8, 8, 4), torch.randn(8, 8) / 9, torch.randn(8, 8)
    mask = torch.arange(8) < torch.arange(1, 9).unsqueeze(1)
    weight = torch.full((4,), 0.1, requires_grad=True)
    tokens, sequences = count_targets(mask)
    for rows in shards:
        inputs = LossInput(features[rows] @ weight, old[rows], advantages[rows], mask[rows])
        token_loss = POLICY_LOSSES[loss](inputs).loss_BT
        aggregate(token_loss, mask[rows], mode, num_tokens=tokens, num_sequences=sequences, length=16).backward()
    return weight.grad


@pytest.mark.golden
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
def test_case_55_gradient_does_not_depend_on_micro_batching_or_ranks(mode, loss):
    """8 × 1, 4 × 2, 1 × 8; two ranks of 4 rows (uneven micro-batches) add up to the same."""
    whole = gradient([list(range(8))], mode, loss)

    singles = gradient([[row] for row in range(8)], mode, loss)
    pairs = gradient([[0, 7], [1, 6], [2, 5], [3, 4]], mode, loss)
    ranks = gradient([[0, 2], [4, 6]], mode, loss) + gradient([[1, 3, 5], [7]], mode, loss)

    assert whole.abs().max() > 1e-3
    for other in (singles, pairs, ranks):
        torch.testing.assert_close(other, whole, atol=1e-6, rtol=0)
