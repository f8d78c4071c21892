from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import training_cases as cases

pytestmark = pytest.mark.pipeline


@pytest.fixture(scope="module")
def ranks(two_ranks):
    return two_ranks


@pytest.fixture(scope="module")
def model(tiny_model):
    return str(tiny_model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradient_does_not_depend_on_the_number_of_ranks_case_55(ranks, model, stage):
    rows = cases.experiences()
    expected = cases.naive_gradient(model, rows)

    both = ranks.run(cases.gradient, model, rows, [f"ds.zero_stage={stage}", "train.micro_batch_size=4"])

    assert all(cases.largest_difference(gradient, expected) < 1e-6 for gradient in both)


@pytest.mark.parametrize(("stage", "packs"), [(2, False), (3, False), (2, True), (3, True)])
def test_three_samples_over_two_ranks_case_47(ranks, model, stage, packs):
    """One rank has one row and repeats it; with chunks of one token, ranks also differ in their number of chunks."""
    rows = cases.experiences(lengths=[7, 2, 3])
    expected = cases.naive_gradient(model, rows)
    settings = [
        f"ds.zero_stage={stage}",
        f"ds.packing_samples={packs}",
        "train.micro_batch_size=1",
        "ds.logprob_chunk=1",
    ]

    both = ranks.run(cases.gradient, model, rows, settings)

    assert all(cases.largest_difference(gradient, expected) < 1e-6 for gradient in both)


def test_shares_of_the_ranks_are_all_rows_once(ranks, model):
    """Three rows, one of them without actions: under ZeRO-3 both ranks must still make the same passes."""
    rows = [*cases.experiences(lengths=[5, 2]), cases.experience(2, 0, prompt=9)]

    first, second = ranks.run(cases.logprobs, model, rows, ["ds.zero_stage=3", "rollout.micro_batch_size=1"])

    assert sorted([*first, *second]) == [0, 1, 2]


@pytest.mark.parametrize("stage", [2, 3])
def test_loss_that_is_infinite_on_one_rank_skips_the_step_on_both_case_54(ranks, model, stage):
    rows = cases.experiences()
    bad = replace(rows[3], advantages=np.full_like(rows[3].advantages, 3e38))

    both = ranks.run(cases.updates, model, [[*rows[:3], bad, *rows[4:]], rows], [f"ds.zero_stage={stage}"])

    for reports, digests in both:
        assert [r.skipped_steps for r in reports] == [1, 0]
        assert digests[0] == digests[1] != digests[2]


def test_every_rank_reports_the_same_numbers(ranks, model):
    (first, first_digests), (second, second_digests) = ranks.run(
        cases.updates, model, [cases.experiences()], ["train.max_epochs=2"]
    )

    assert replace(first[0], seconds=0) == replace(second[0], seconds=0)
    assert first_digests == second_digests
    assert first[0].num_tokens == 2 * sum(range(1, 9))


def restored_digests(rank, model, rows, folder):
    settings = ["ds.zero_stage=3"]
    first = cases.make_trainer(rank, model, settings)
    first.update(rows, 0)
    first.save(folder)
    second = cases.make_trainer(rank, model, settings)
    second.load(folder)
    return first.weight_digest(), second.weight_digest()


def test_sharded_checkpoint_is_restored_case_14(ranks, model, tmp_path):
    for saved, restored in ranks.run(restored_digests, model, cases.experiences(), tmp_path):
        assert saved == restored
