from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
import training_cases as cases

from rlhf_core.algorithms.corrections import Mismatch
from rlhf_core.training.policy import HALF_UPDATED

pytestmark = pytest.mark.pipeline

ZERO_0, ZERO_1, ZERO_2, ZERO_3 = (f"ds.zero_stage={stage}" for stage in range(4))
BF16 = "ds.param_dtype=bf16"
PACKED = ("ds.packing_samples=true",)


@pytest.fixture(scope="module")
def ranks(one_rank):
    return one_rank


@pytest.fixture(scope="module")
def model(tiny_model):
    return str(tiny_model)


@pytest.fixture(scope="module")
def rows():
    return cases.experiences()


@pytest.fixture(scope="module")
def expected(model, rows):
    return cases.naive_gradient(model, rows)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_gradient_does_not_depend_on_micro_batches_case_55(ranks, model, rows, expected, size):
    [gradient] = ranks.run(cases.gradient, model, rows, [f"train.micro_batch_size={size}"])

    assert cases.largest_difference(gradient, expected) < 1e-6


@pytest.mark.parametrize("stage", [ZERO_0, ZERO_1, ZERO_3])
def test_gradient_does_not_depend_on_the_zero_stage(ranks, model, rows, expected, stage):
    [gradient] = ranks.run(cases.gradient, model, rows, [stage, "train.micro_batch_size=2"])

    assert cases.largest_difference(gradient, expected) < 1e-6


@pytest.mark.parametrize(
    "overrides",
    [
        (
            "train.dynamic_batch_enable=true",
            "train.max_tokens_per_gpu=24",
            "data.max_len=24",
            "rollout.max_new_tokens=9",
        ),
        ("ds.logprob_chunk=3",),
        ("actor.gradient_checkpointing_enable=true",),
        ("actor.gradient_checkpointing_enable=true", ZERO_3),
        (*PACKED, "train.micro_batch_size=3"),
        (*PACKED, "actor.gradient_checkpointing_enable=true", ZERO_3),
        (
            *PACKED,
            "train.dynamic_batch_enable=true",
            "train.max_tokens_per_gpu=24",
            "data.max_len=24",
            "rollout.max_new_tokens=9",
        ),
    ],
)
def test_gradient_does_not_depend_on_how_memory_is_saved(ranks, model, rows, expected, overrides):
    [gradient] = ranks.run(cases.gradient, model, rows, overrides)

    assert cases.largest_difference(gradient, expected) < 1e-6


def test_row_without_actions_changes_nothing_case_53(ranks, model, rows, expected):
    [gradient] = ranks.run(cases.gradient, model, [*rows, cases.experience(8, num_actions=0)])

    assert cases.largest_difference(gradient, expected) < 1e-6


@pytest.mark.parametrize("overrides", [(ZERO_2,), (ZERO_3,), (ZERO_3, *PACKED)])
def test_logprobs_are_those_of_a_naive_forward_pass(ranks, model, overrides):
    """Padding or none, several lengths, several temperatures, and a row without actions."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(model)
    rows = [cases.experience(i, n, temperature=t) for i, (n, t) in enumerate([(1, 1.0), (9, 0.5), (4, 1.3)])]

    [scored] = ranks.run(
        cases.logprobs, model, [*rows, cases.experience(3, 0)], [*overrides, "rollout.micro_batch_size=3"]
    )

    for i, row in enumerate(rows):
        [(start, end)] = row.action_ranges
        np.testing.assert_allclose(scored[i][start:end], cases.naive_logprobs(hf, row).detach(), atol=1e-5)
        assert not scored[i][:start].any()
    assert scored[3].tolist() == [0, 0, 0]


@pytest.mark.parametrize("overrides", [(ZERO_2,), (ZERO_3,), (ZERO_2, *PACKED), (ZERO_3, *PACKED)])
def test_reference_scores_as_the_policy_does_at_its_start(ranks, model, rows, overrides):
    [policy] = ranks.run(cases.logprobs, model, rows, overrides)

    [reference] = ranks.run(cases.reference_logprobs, model, rows, overrides)

    assert all(np.array_equal(policy[i], reference[i]) for i in range(len(rows)))


def test_first_ratio_is_one_at_another_temperature_case_62(ranks, model):
    rows = cases.experiences(temperature=0.5)
    [scored] = ranks.run(cases.logprobs, model, rows)
    rows = cases.with_own_logprobs(rows, [scored[i] for i in range(len(rows))])

    [(reports, _)] = ranks.run(cases.updates, model, [rows])

    assert reports[0].ratio_max == pytest.approx(1, abs=1e-5)
    assert reports[0].ratio_mean == pytest.approx(1, abs=1e-5)
    assert reports[0].mismatch == 0


@pytest.mark.parametrize("overrides", [(ZERO_2,), (ZERO_3, *PACKED)])
def test_one_pass_gives_what_two_do(ranks, model, rows, overrides):
    """The log-probs before the only step: asked for before, or taken from the pass that learns; the engine says others."""
    overrides = (*overrides, "algo.advantage.is_correction_enable=true", "train.micro_batch_size=3")
    [scored] = ranks.run(cases.logprobs, model, rows, overrides)
    asked = [replace(row, old_logprobs=scored[i], rollout_logprobs=scored[i] * 1.3) for i, row in enumerate(rows)]
    taken = [replace(row, old_logprobs=None) for row in asked]

    [one], [two] = (ranks.run(cases.gradient, model, batch, overrides) for batch in (taken, asked))
    [([report], _)], [([report_of_two], _)] = (
        ranks.run(cases.updates, model, [rs], overrides) for rs in (taken, asked)
    )

    assert cases.largest_difference(one, two) < 1e-6
    log_weights = torch.cat([torch.from_numpy(a.old_logprobs - a.rollout_logprobs)[a.old_logprobs != 0] for a in asked])
    assert report.advantage_metrics() == pytest.approx(Mismatch.of(log_weights).metrics(), rel=1e-5)
    assert (report_of_two.advantage_metrics(), report.ratio_max) == ({}, 1)
    untimed, expected = ({**found.metrics(), "seconds": 0} for found in (report, report_of_two))
    assert untimed == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("overrides", [(ZERO_0,), (ZERO_2,), (ZERO_3,), (ZERO_2, BF16), (ZERO_2, BF16, *PACKED)])
def test_a_restored_run_goes_on_bit_for_bit_case_14(ranks, model, tmp_path, overrides):
    batches = [cases.experiences(seed=seed) for seed in range(4)]
    overrides = (*overrides, "actor.lr_scheduler=linear", "train.batch_size=4")
    [(straight, digests)] = ranks.run(cases.updates, model, batches, overrides)

    [(reports, digest, counters)] = ranks.run(cases.continued, model, batches, overrides, tmp_path)

    assert digest == digests[-1]
    assert [r.policy_loss for r in reports] == [r.policy_loss for r in straight[2:]]
    assert [r.lr for r in reports] == [r.lr for r in straight[2:]]
    assert counters == (4, 8)


@pytest.mark.parametrize("overrides", [(ZERO_0,), (ZERO_2,), (ZERO_3,), (ZERO_0, BF16), (ZERO_2, BF16)])
@pytest.mark.parametrize("poison", ["rollout_logprobs", "advantages"])
def test_step_that_is_not_finite_is_skipped_and_the_next_is_normal_case_54(ranks, model, rows, overrides, poison):
    """A NaN that the rows show, and an advantage that is finite itself but makes an infinite loss."""
    bad = np.full_like(rows[3].advantages, np.nan if poison == "rollout_logprobs" else 3e38)
    batches = [[*rows[:3], replace(rows[3], **{poison: bad}), *rows[4:]], rows]
    [(_, normal)] = ranks.run(cases.updates, model, [rows], overrides)

    [(reports, digests)] = ranks.run(cases.updates, model, batches, overrides)

    assert [(r.applied_steps, r.skipped_steps) for r in reports] == [(0, 1), (1, 0)]
    assert digests == [normal[0], normal[0], normal[1]]
    assert all(np.isfinite(list(r.metrics().values())).all() for r in reports)


def norm_weights(rank, model, rows, num_updates):
    """The final norm, all ones at first, after each update."""
    trainer = cases.make_trainer(rank, model, [BF16, "actor.adam.lr=5e-4", "actor.policy_loss_type=cispo"])
    seen = []
    for iteration in range(num_updates):
        trainer.update(rows, iteration)
        seen.append(dict(trainer.named_weights())["model.norm.weight"].clone())
    return seen


def test_bf16_policy_learns_in_fp32_master_weights(ranks, model, rows):
    """Steps of 5e-4 around 1, where bf16 has no number within .0019: each alone is rounded away, their sum is not."""
    [seen] = ranks.run(norm_weights, model, rows, 40)

    assert seen[0].dtype == torch.bfloat16
    assert (seen[0] == 1).all()
    assert (seen[-1] != 1).any()


@pytest.mark.parametrize("overrides", [(BF16, ZERO_0), (BF16, ZERO_1), (BF16, ZERO_2), (BF16, ZERO_3)])
def test_bf16_policy_makes_rewarded_tokens_likelier(ranks, model, rows, overrides):
    """``approx_kl`` is the mean of old minus new log-prob."""
    [(reports, _)] = ranks.run(cases.updates, model, [cases.rewarded(rows)] * 6, overrides)

    assert reports[-1].approx_kl < reports[0].approx_kl - 0.05


def exported(rank, model, rows, folder):
    trainer = cases.make_trainer(rank, model, [ZERO_3])
    trainer.update(rows, 0)
    trainer.export_hf(folder)
    return {name: weight.numpy().copy() for name, weight in trainer.named_weights()}


def test_export_is_a_hugging_face_folder_with_the_new_weights(ranks, model, rows, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    [weights] = ranks.run(exported, model, rows, tmp_path / "hf")

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert all(np.array_equal(p.detach().numpy(), weights[name]) for name, p in loaded.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").decode([72, 105]) == "Hi"


def load_error(rank, model, folder, overrides):
    from rlhf_core.errors import TrainingError

    try:
        cases.make_trainer(rank, model, overrides).load(folder)
    except TrainingError as error:
        return str(error)


def test_checkpoint_that_does_not_fit_says_so(ranks, model, tmp_path):
    ranks.run(cases.continued, model, [cases.experiences()], [ZERO_2], tmp_path / "saved")

    [absent] = ranks.run(load_error, model, tmp_path, [ZERO_2])
    [misfit] = ranks.run(load_error, model, tmp_path / "saved", [ZERO_3])

    assert "no complete checkpoint" in absent
    assert "zero_stage=2, this run has 3" in misfit


class Planted:
    """Makes a folder when its pickle is read as Python reads pickles."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"])
def test_checkpoint_that_could_run_code_is_refused(ranks, model, tmp_path, name):
    ranks.run(cases.continued, model, [cases.experiences()], [ZERO_2], tmp_path / "saved")
    [file] = (tmp_path / "saved").rglob(name)
    torch.save({"module": Planted(tmp_path / "ran")}, file)

    [refused] = ranks.run(load_error, model, tmp_path / "saved", [ZERO_2])

    assert "could run code" in refused
    assert "posix.mkdir" in refused
    assert not (tmp_path / "ran").exists()


def test_an_update_without_rows_changes_nothing(ranks, model, rows):
    """The last batch of a filtered run may be empty."""
    [(reports, digests)] = ranks.run(cases.updates, model, [[], rows])

    assert digests[0] == digests[1] != digests[2]
    assert (reports[0].applied_steps, reports[0].num_tokens, reports[0].kl) == (0, 0, None)


def test_an_update_that_breaks_off_leaves_no_version(ranks, model, rows):
    """Its weights have moved: nobody may take them for those before it, and train on top of them."""
    [(before, after)] = ranks.run(cases.broken_off_update, model, rows)

    assert (before, after) == (0, HALF_UPDATED)
