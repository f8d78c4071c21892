"""The seeded order of prompts, cursors, mixing and sample seeds."""

from collections import Counter
from itertools import chain

import pytest

from rlhf_core.data import PromptOrder, iterations, sample_seed
from rlhf_core.errors import DataError
from rlhf_core.records import PromptCursor

GOLDEN_ORDER = [0, 7, 3, 4, 6, 1, 5, 2]  # recorded from the first version
GOLDEN_SEED = 1132801922


def draw_all(order, batch, epochs, cursor=None):
    """Batches until ``epochs`` epochs are over."""
    cursor, batches = cursor or PromptCursor(), []
    while cursor.epoch < epochs:
        indices, cursor = order.draw(cursor, batch)
        batches.append(indices)
    return batches


def test_case_1_uneven_tail_is_a_short_batch():
    batches = draw_all(PromptOrder([7], seed=0), batch=2, epochs=1)

    assert [len(batch) for batch in batches] == [2, 2, 2, 1]
    assert sorted(chain.from_iterable(batches)) == list(range(7))


def test_case_5_resume_at_an_epoch_boundary_draws_the_next_epoch():
    order = PromptOrder([8], seed=0)
    straight = draw_all(order, batch=4, epochs=2)

    assert draw_all(PromptOrder([8], seed=0), batch=4, epochs=2, cursor=PromptCursor(1, 0)) == straight[2:]
    assert order.draw(PromptCursor(0, 8), 4)[0] == straight[2]


def test_case_16_resume_inside_an_epoch_draws_what_would_have_come():
    straight = draw_all(PromptOrder([10], seed=3), batch=3, epochs=2)
    _, cursor = PromptOrder([10], seed=3).draw(PromptCursor(), 3)

    resumed = draw_all(PromptOrder([10], seed=3), batch=3, epochs=2, cursor=cursor)

    assert resumed == straight[1:]


def test_case_24_fewer_prompts_than_a_batch_are_one_short_batch():
    assert [len(batch) for batch in draw_all(PromptOrder([3], seed=0), batch=8, epochs=1)] == [3]


def test_case_114_the_seed_decides_the_order():
    first, again, other = (list(PromptOrder([20], seed).epoch(0)) for seed in (1, 1, 2))

    assert first == again
    assert first != other


def test_epochs_differ_and_do_not_depend_on_what_was_asked_before():
    order = PromptOrder([20], seed=1)
    zero, one = list(order.epoch(0)), list(order.epoch(1))

    assert zero != one
    assert list(order.epoch(0)) == zero


@pytest.mark.golden
def test_order_is_frozen_over_versions():
    """A change here would reorder runs that resume."""
    assert list(PromptOrder([8], seed=42).epoch(0)) == GOLDEN_ORDER
    assert sample_seed(42, 3, "sums:7", 1) == GOLDEN_SEED


def test_position_that_does_not_exist_is_refused():
    with pytest.raises(DataError, match="position 9 of epoch 0 does not exist in 8 prompts"):
        PromptOrder([8], seed=0).draw(PromptCursor(0, 9), 1)


def test_nothing_to_draw_is_refused():
    with pytest.raises(DataError, match="nothing to draw"):
        PromptOrder([], seed=0)


def test_weighted_epoch_holds_the_weights_and_no_row_twice():
    """Sizes 10 and 100, weights .25 and .75: N = 10 / .25 = 40, ten and thirty rows."""
    epoch = list(PromptOrder([10, 100], seed=0, probs=[1, 3]).epoch(0))

    assert len(set(epoch)) == len(epoch) == 40
    assert sorted(index for index in epoch if index < 10) == list(range(10))


def test_rows_left_over_open_the_next_weighted_epoch():
    """Of 100 rows, 30 an epoch: the first three epochs share none; ten epochs give each row three times."""
    order = PromptOrder([10, 100], seed=0, probs=[0.25, 0.75])
    large = [[index for index in order.epoch(epoch) if index >= 10] for epoch in range(10)]

    assert len(set(large[0] + large[1] + large[2])) == 90
    assert Counter(chain.from_iterable(large)) == dict.fromkeys(range(10, 110), 3)


def test_weights_are_exact_decimals():
    """0.1 + 0.2 + 0.7 in binary is not 1: the sizes must still come out whole."""
    order = PromptOrder([10, 20, 70], seed=0, probs=[0.1, 0.2, 0.7])

    assert sorted(order.epoch(0)) == list(range(100))


def test_weight_zero_leaves_a_dataset_out_and_a_tiny_one_is_refused():
    assert max(PromptOrder([5, 5], seed=0, probs=[1, 0]).epoch(0)) == 4
    with pytest.raises(DataError, match=r"the weight 0.001 of dataset 1 gives it no row in an epoch of 5"):
        PromptOrder([5, 5], seed=0, probs=[0.999, 0.001])


@pytest.mark.parametrize(
    ("size", "batch", "episodes", "expected"), [(7, 2, 1, 4), (8, 4, 2, 4), (3, 8, 1, 1), (9, 8, 3, 6)]
)
def test_iterations_count_the_short_batches(size, batch, episodes, expected):
    assert iterations(size, batch, episodes) == expected
    assert len(draw_all(PromptOrder([size], seed=0), batch, episodes)) == expected


def test_case_114_and_16_each_sample_has_its_own_seed():
    seeds = {
        sample_seed(run, iteration, row, sample)
        for run in (1, 2)
        for iteration in range(5)
        for row in ("a:1", "a:11", "a:1,1")
        for sample in range(8)
    }

    assert len(seeds) == 2 * 5 * 3 * 8
    assert all(0 <= seed < 2**31 for seed in seeds)
