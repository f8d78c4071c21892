"""Micro-batches without padding cost the sum of their rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.batching import plan_forward, plan_pairs, plan_update
from rlhf_core.errors import TrainingError

lengths_lists = st.lists(st.integers(1, 60), min_size=1, max_size=40)
worlds = st.integers(1, 8)


def real_rows(plans):
    return sorted(row for plan in plans for micro in plan if not micro.filler for row in micro.rows)


def tokens(micro, lengths):
    return sum(lengths[row] for row in micro.rows)


@given(lengths_lists, worlds, st.integers(60, 200))
def test_budget_is_never_exceeded_and_no_rank_is_without_work(lengths, world_size, budget):
    plans = plan_forward(lengths, world_size, micro_batch_size=1, token_budget=budget, packed=True)

    assert real_rows(plans) == list(range(len(lengths)))
    assert len({len(plan) for plan in plans}) == 1
    assert all(tokens(micro, lengths) <= budget for plan in plans for micro in plan)


@given(lengths_lists, st.integers(60, 200))
def test_budget_is_filled(lengths, budget):
    """No two micro-batches would fit into one."""
    [plan] = plan_forward(lengths, 1, micro_batch_size=1, token_budget=budget, packed=True)

    smallest = sorted(tokens(micro, lengths) for micro in plan)[:2]
    assert len(plan) == 1 or sum(smallest) > budget


@given(lengths_lists, worlds, st.integers(1, 9))
def test_micro_batches_of_so_many_rows_are_equally_long_but_for_one_row(lengths, world_size, size):
    plans = plan_forward(lengths, world_size, size, packed=True)

    assert real_rows(plans) == list(range(len(lengths)))
    assert all(0 < len(micro.rows) <= size for plan in plans for micro in plan)
    [alone] = plan_forward(lengths, 1, size, packed=True)
    sums = [tokens(micro, lengths) for micro in alone]
    assert max(sums) - min(sums) <= max(lengths)


def test_long_and_short_rows_share_a_micro_batch():
    lengths = [100, 10, 20, 60, 10]

    [plan] = plan_forward(lengths, 1, micro_batch_size=1, token_budget=100, packed=True)

    assert [micro.rows for micro in plan] == [(0,), (3, 2, 1, 4)]


def test_row_longer_than_the_budget_is_refused():
    with pytest.raises(TrainingError, match="row 1 has 11 tokens, but a micro-batch may hold 10"):
        plan_forward([4, 11], 1, 8, token_budget=10, packed=True)


def test_pair_costs_both_of_its_rows():
    """Padded, it costs 2 x 30 tokens, which the budget does not hold."""
    step = plan_pairs(
        [0, 1], [(30, 2), (5, 3)], [(1, 1)] * 2, world_size=1, micro_batch_size=1, token_budget=40, packed=True
    )

    assert [micro.rows for micro in step.micro_batches[0]] == [(0, 1)]


def test_steps_are_those_of_padded_rows():
    """The same rows in the same optimizer steps, counted alike."""
    lengths, actions = [9, 40, 3, 7, 22, 5, 5, 8], [1, 2, 3, 4, 5, 6, 7, 8]
    settings = {
        "world_size": 2,
        "samples_per_step": 2,
        "max_epochs": 2,
        "seed": 7,
        "iteration": 3,
        "micro_batch_size": 2,
        "episodes": ["a", "a", "b", "c", "c", "d", "e", "f"],
    }

    padded, packed = (plan_update(lengths, actions, packed=packed, **settings) for packed in (False, True))

    for one, other in zip(padded, packed, strict=True):
        assert real_rows(one.micro_batches) == real_rows(other.micro_batches)
        assert (one.num_tokens, one.num_sequences, one.episode_tokens) == (
            other.num_tokens,
            other.num_sequences,
            other.episode_tokens,
        )
