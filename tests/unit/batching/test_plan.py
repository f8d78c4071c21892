from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.batching import MicroBatch, plan_forward, plan_pairs, plan_step, plan_update
from rlhf_core.errors import TrainingError

lengths_lists = st.lists(st.integers(1, 60), min_size=1, max_size=40)
worlds = st.integers(1, 8)
sizes = st.integers(1, 9)


def real_rows(plans):
    return [row for plan in plans for micro in plan if not micro.filler for row in micro.rows]


def padded_tokens(micro, lengths):
    return len(micro.rows) * max(lengths[row] for row in micro.rows)


def update_plan(lengths, num_actions=None, **changes):
    settings = {
        "world_size": 2,
        "samples_per_step": 4,
        "max_epochs": 1,
        "seed": 7,
        "iteration": 3,
        "micro_batch_size": 2,
        **changes,
    }
    return plan_update(lengths, num_actions or [1] * len(lengths), **settings)


@given(lengths_lists, worlds, sizes)
def test_forward_visits_every_row_once_with_equal_counts_on_all_ranks(lengths, world_size, size):
    plans = plan_forward(lengths, world_size, size)

    assert sorted(real_rows(plans)) == list(range(len(lengths)))
    assert len({len(plan) for plan in plans}) == 1
    assert all(0 < len(micro.rows) <= size for plan in plans for micro in plan)


@given(lengths_lists, worlds, st.integers(60, 200))
def test_token_budget_counts_padding_and_is_never_exceeded(lengths, world_size, budget):
    plans = plan_forward(lengths, world_size, micro_batch_size=1, token_budget=budget)

    assert sorted(real_rows(plans)) == list(range(len(lengths)))
    assert all(padded_tokens(micro, lengths) <= budget for plan in plans for micro in plan)


def test_token_budget_fills_micro_batches_by_tokens_instead_of_rows():
    plans = plan_forward([10, 3, 3, 3], 1, micro_batch_size=1, token_budget=10)

    assert plans == ((MicroBatch((0,)), MicroBatch((1, 2, 3))),)


def test_row_longer_than_the_token_budget_is_refused():
    with pytest.raises(TrainingError, match="row 1 has 11 tokens, but a micro-batch may hold 10"):
        plan_forward([4, 11], 1, 8, token_budget=10)


def test_ranks_are_balanced_by_tokens_not_by_rows():
    plans = plan_forward([100, 20, 20, 20, 20, 20], 2, micro_batch_size=8)

    tokens = [sum([100, 20, 20, 20, 20, 20][row] for row in real_rows([plan])) for plan in plans]
    assert tokens == [100, 100]


def test_rows_of_a_micro_batch_have_similar_lengths():
    plans = plan_forward([1, 9, 2, 8], 1, micro_batch_size=2)

    assert plans == ((MicroBatch((1, 3)), MicroBatch((2, 0))),)


@pytest.mark.parametrize(("rows", "world_size"), [(3, 2), (9, 8), (1, 4)])
def test_uneven_work_gives_every_rank_as_many_micro_batches_case_47(rows, world_size):
    plans = plan_forward([5] * rows, world_size, micro_batch_size=1)

    assert len({len(plan) for plan in plans}) == 1
    assert sorted(real_rows(plans)) == list(range(rows))


def test_rank_with_rows_to_cut_needs_no_filler():
    """Tokens 30 + 5 on rank 0, 10 + 10 + 10 + 5 on rank 1: one micro-batch of two rows is cut to match two."""
    plans = plan_forward([30, 10, 10, 10, 5, 5], 2, micro_batch_size=2)

    assert plans[0] == (MicroBatch((0,)), MicroBatch((4,)))
    assert [len(micro.rows) for micro in plans[1]] == [2, 2]


def test_no_rows_give_empty_plans():
    assert plan_forward([], 3, 8) == ((), (), ())


@given(lengths_lists, worlds, st.integers(1, 50), st.integers(1, 3), sizes)
def test_update_trains_every_row_once_an_epoch(lengths, world_size, samples_per_step, epochs, size):
    steps = update_plan(
        lengths,
        world_size=world_size,
        samples_per_step=samples_per_step,
        max_epochs=epochs,
        micro_batch_size=size,
    )

    for epoch in range(epochs):
        rows = [row for step in steps if step.epoch == epoch for row in real_rows(step.micro_batches)]
        assert sorted(rows) == list(range(len(lengths)))
    assert all(len({len(plan) for plan in step.micro_batches}) == 1 for step in steps)
    assert all(step.num_sequences <= samples_per_step for step in steps)


def test_missing_samples_are_spread_over_the_steps():
    """10 rows of 12 came back, steps of 4: 4 + 3 + 3 rather than 4 + 4 + 2."""
    steps = update_plan([5] * 10)

    assert [step.num_sequences for step in steps] == [4, 3, 3]


def test_rows_without_actions_are_in_no_step_case_53():
    steps = update_plan([5, 6, 7], num_actions=[2, 0, 3])

    assert [sorted(real_rows(step.micro_batches)) for step in steps] == [[0, 2]]
    assert (steps[0].num_tokens, steps[0].num_sequences) == (5, 2)


def test_no_trainable_row_gives_no_step():
    assert update_plan([5, 6], num_actions=[0, 0]) == []


def test_order_follows_seed_iteration_and_epoch():
    lengths = list(range(1, 33))

    first = update_plan(lengths, max_epochs=2)

    assert first == update_plan(lengths, max_epochs=2)
    assert first != update_plan(lengths, max_epochs=2, seed=8)
    assert first != update_plan(lengths, max_epochs=2, iteration=4)
    assert first[0].micro_batches != first[len(first) // 2].micro_batches


@given(lengths_lists, worlds, sizes, st.randoms(use_true_random=False))
def test_step_has_exactly_the_given_rows(lengths, world_size, size, random):
    rows = random.sample(range(len(lengths)), random.randint(1, len(lengths)))

    step = plan_step(rows, lengths, lengths, world_size=world_size, micro_batch_size=size, epoch=4)

    assert sorted(real_rows(step.micro_batches)) == sorted(rows)
    assert len({len(plan) for plan in step.micro_batches}) == 1
    assert all(0 < len(micro.rows) <= size for plan in step.micro_batches for micro in plan)
    assert (step.epoch, step.num_sequences, step.num_tokens) == (4, len(rows), sum(lengths[row] for row in rows))


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=40), worlds, st.integers(60, 200)
)
def test_every_pair_is_in_one_micro_batch_whose_both_halves_fit_the_budget(lengths, world_size, budget):
    actions = [(1, 2)] * len(lengths)

    step = plan_pairs(
        range(len(lengths)), lengths, actions, world_size=world_size, micro_batch_size=1, token_budget=budget
    )

    assert sorted(real_rows(step.micro_batches)) == list(range(len(lengths)))
    assert len({len(plan) for plan in step.micro_batches}) == 1
    for micro in (micro for plan in step.micro_batches for micro in plan):
        width = max(max(lengths[pair]) for pair in micro.rows)
        assert 2 * len(micro.rows) * width <= budget
    assert (step.num_sequences, step.num_tokens) == (len(lengths), 3 * len(lengths))


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=40), worlds, sizes)
def test_pairs_in_micro_batches_of_a_size(lengths, world_size, size):
    step = plan_pairs(range(len(lengths)), lengths, lengths, world_size=world_size, micro_batch_size=size)

    assert sorted(real_rows(step.micro_batches)) == list(range(len(lengths)))
    assert all(0 < len(micro.rows) <= size for plan in step.micro_batches for micro in plan)


def test_pairs_are_balanced_by_the_longer_row():
    """Costs 40, 20 and 20: the long pair alone on one rank, though its other row is short."""
    step = plan_pairs([0, 1, 2], [(20, 1), (10, 10), (1, 10)], [(1, 1)] * 3, world_size=2, micro_batch_size=8)

    assert [sorted(real_rows([plan])) for plan in step.micro_batches] == [[0], [1, 2]]


def test_pair_longer_than_the_token_budget_is_refused():
    with pytest.raises(TrainingError, match="pair 1 has 22 tokens, but a micro-batch may hold 20"):
        plan_pairs([0, 1], [(4, 4), (3, 11)], [(1, 1)] * 2, world_size=1, micro_batch_size=1, token_budget=20)


def test_no_pairs_give_an_empty_step():
    assert plan_pairs([], [], [], world_size=2, micro_batch_size=1, token_budget=9).micro_batches == ((), ())
