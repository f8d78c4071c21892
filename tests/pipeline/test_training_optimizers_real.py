"""Muon and the moving average under DeepSpeed: what they do to the weights, and that a restored run goes on with them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import training_cases as cases

pytestmark = pytest.mark.pipeline

ZERO_0, ZERO_1, ZERO_2, ZERO_3 = (f"ds.zero_stage={stage}" for stage in range(4))
BF16 = "ds.param_dtype=bf16"
LR, ADAM_LR = 0.02, 1e-3
MUON = ("actor.optim=muon", "actor.max_norm=1", f"actor.muon.lr={LR}", f"actor.adam.lr={ADAM_LR}")
MATRICES = ("proj.weight",)  # of attention and MLP; the embedding is the output layer too

BETA = 0.992


@pytest.fixture(scope="module")
def model(tiny_model):
    return str(tiny_model)


@pytest.fixture(scope="module")
def rows():
    return cases.experiences()


def orthogonalised(gradient):
    """Newton-Schulz's iteration as Keller Jordan gives it: 5 steps of a quintic, scaled by the shape; here in fp64."""
    x = gradient.astype(np.float64) / np.linalg.norm(gradient)
    x = x.T if tall(gradient) else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return (x.T if tall(gradient) else x) * scale(gradient)


def tall(matrix):
    return matrix.shape[0] > matrix.shape[1]


def scale(matrix):
    return max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5


# --- what the ranks run


def weights_of(trainer):
    """fp32 masters by name."""
    from rlhf_core.training.weights import master_weights

    masters = master_weights(trainer.hf_model, trainer.engine.optimizer)
    return {name: weight.detach().cpu().float().numpy().copy() for name, weight in masters}


def first_step(rank, model, rows, overrides):
    """The weights before and after one update. Matrices are orthogonalised in fp32, not in the half precision of the device."""
    from deepspeed.accelerator import get_accelerator

    trainer = cases.make_trainer(rank, model, overrides)
    before = weights_of(trainer)
    get_accelerator().is_fp16_supported = lambda: False
    try:
        report = trainer.update(rows, 0)
    finally:
        del get_accelerator().is_fp16_supported
    return before, weights_of(trainer), report


def averaged(rank, model, batches, overrides, folder):
    """The weights that were averaged, in order; the average itself; the same after it was saved and loaded; and exported."""
    settings = ["train.enable_ema=true", f"train.ema_beta={BETA}", *overrides]
    trainer = cases.make_trainer(rank, model, settings)
    seen = [weights_of(trainer)]
    for iteration, rows in enumerate(batches):
        trainer.update(rows, iteration)
        seen.append(weights_of(trainer))
    trainer.save(folder / "state")
    trainer.export_average(folder / "hf_ema")
    again = cases.make_trainer(rank, model, settings)
    again.load(folder / "state")
    own, restored = ({name: w.numpy() for name, w in t.average._average.items()} for t in (trainer, again))
    whole = {name: w.float().numpy().copy() for name, w in again.average.weights()}
    return seen, own, restored, whole


def constant(rank, folder, resumed):
    """Two parameters of 1.0 that jump to 1.02 and stay there, averaged 1000 times; with ``resumed``, saved half-way."""
    from rlhf_core.training.moving_average import MovingAverage

    module = torch.nn.Linear(1, 1)
    start_at(module, 1.0)
    average = MovingAverage(module, None, BETA, rank)
    start_at(module, 1.02)
    for _ in range(500):
        average.update()
    if resumed:
        average.save(folder)
        torch.distributed.barrier()  # a checkpoint is read when it is complete
        average = MovingAverage(module, None, BETA, rank)  # starts at 1.02
        average.load(folder)
    for _ in range(500):
        average.update()
    return [float(weight) for weight in average._average.values()], [w.item() for _, w in average.weights()]


def start_at(module, value):
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, value)


def restored_without(rank, model, rows, folder):
    """What a run says that has an average, and finds a checkpoint of one that had none."""
    from rlhf_core.errors import TrainingError

    first = cases.make_trainer(rank, model)
    first.update(rows, 0)
    first.save(folder)
    try:
        cases.make_trainer(rank, model, ["train.enable_ema=true"]).load(folder)
    except TrainingError as error:
        return str(error)
    raise AssertionError("it was loaded")


# --- Muon


EVERY_STAGE = [
    (ZERO_0,),
    (ZERO_1,),
    (ZERO_2,),
    (ZERO_3,),
    (ZERO_0, BF16),
    (ZERO_1, BF16),
    (ZERO_2, BF16),
    (ZERO_3, BF16),
]


@pytest.mark.parametrize("overrides", EVERY_STAGE)
def test_muon_moves_matrices_by_an_orthogonal_update_and_the_rest_by_adamw(one_rank, model, rows, overrides):
    """With the default ``max_norm``: an update is never clipped. AdamW's first step is its learning rate."""
    gradient = cases.naive_gradient(model, rows)

    [(before, after, report)] = one_rank.run(first_step, model, rows, [*MUON, *overrides])

    moved = {name: before[name] - after[name] for name in before}
    matrices = [name for name in moved if name.endswith(MATRICES)]
    assert len(matrices) == 14
    for name in matrices:
        expected = LR * orthogonalised(gradient[name])
        limit = 0.35 if BF16 in overrides else 1e-3  # bf16 gradients: noise in directions of rank 0 is made large too
        assert np.linalg.norm(moved[name] - expected) < limit * np.linalg.norm(expected), name
        largest = np.linalg.svd(moved[name], compute_uv=False)[:4] / (LR * scale(moved[name]))
        assert ((largest > 0.5) & (largest < 1.5)).all(), name
    for name in moved.keys() - matrices:
        touched = np.abs(gradient[name]) > 1e-4
        stepped = np.isclose(np.abs(moved[name][touched]), ADAM_LR, rtol=0.01)
        # In bf16 a gradient can round to exactly 0; which one does depends on the kernels of the machine.
        assert (~stepped).sum() <= (1e-4 * stepped.size if BF16 in overrides else 0), name
    assert (report.applied_steps, np.isfinite(report.grad_norm)) == (1, True)


@pytest.mark.parametrize("overrides", [(ZERO_0, BF16), (ZERO_2, BF16), (ZERO_3,)])
def test_adamw_takes_its_first_step_at_its_learning_rate(one_rank, model, rows, overrides):
    """Sign descent, and the decay of one step: DeepSpeed takes none of its own before."""
    from transformers import AutoModelForCausalLM

    gradient = cases.naive_gradient(model, rows)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16 if BF16 in overrides else torch.float32)

    [(before, after, _)] = one_rank.run(first_step, model, rows, ["actor.adam.weight_decay=0.1", *overrides])

    assert all(np.array_equal(p.detach().float().numpy(), before[name]) for name, p in loaded.named_parameters())
    embedding, norm = "model.embed_tokens.weight", "model.norm.weight"
    for name, decay in ((embedding, 0.1), (norm, 0.0)):
        touched = np.abs(gradient[name]) > 1e-3
        expected = before[name] - ADAM_LR * (np.sign(gradient[name]) + decay * before[name])
        np.testing.assert_allclose(after[name][touched], expected[touched], rtol=0, atol=1e-5)


@pytest.mark.parametrize("overrides", [(ZERO_0,), (ZERO_2,), (ZERO_3,), (ZERO_2, BF16)])
def test_muon_goes_on_bit_for_bit_after_a_restore_case_14(one_rank, model, tmp_path, overrides):
    batches = [cases.experiences(seed=seed) for seed in range(4)]
    overrides = (*MUON, *overrides, "actor.lr_scheduler=linear")
    [(straight, digests)] = one_rank.run(cases.updates, model, batches, overrides)

    [(reports, digest, counts)] = one_rank.run(cases.continued, model, batches, overrides, tmp_path)

    assert digest == digests[-1]
    assert [r.policy_loss for r in reports] == [r.policy_loss for r in straight[2:]]
    assert counts == (4, 4)


@pytest.mark.parametrize("stage", [ZERO_0, ZERO_2, ZERO_3])
def test_muon_takes_the_same_step_on_two_ranks(one_rank, two_ranks, model, rows, stage):
    [(_, alone, _)] = one_rank.run(first_step, model, rows, [*MUON, stage])

    both = two_ranks.run(first_step, model, rows, [*MUON, stage])

    for _, after, _ in both:
        assert max(np.abs(after[name] - alone[name]).max() for name in alone) < 1e-5


@pytest.mark.parametrize("stage", [ZERO_0, ZERO_2, ZERO_3])
def test_muon_forgets_a_step_that_is_not_finite_case_54(one_rank, model, rows, stage):
    """Its momentum too: the next step is that of a run that never saw it."""
    bad = replace(rows[3], advantages=np.full_like(rows[3].advantages, 3e38))
    [(_, normal)] = one_rank.run(cases.updates, model, [rows], [*MUON, stage])

    [(reports, digests)] = one_rank.run(cases.updates, model, [[*rows[:3], bad, *rows[4:]], rows], [*MUON, stage])

    assert [r.skipped_steps for r in reports] == [1, 0]
    assert digests == [normal[0], *normal]


# --- the moving average


@pytest.mark.golden
@pytest.mark.parametrize("resumed", [False, True])
def test_the_average_of_a_constant_case_19(two_ranks, tmp_path, resumed):
    """1.02 - .02 × .992^1000, also across a resume at 500; each rank keeps one of the two parameters."""
    target = float(np.float32(1.02))
    both = two_ranks.run(constant, tmp_path, resumed)

    for kept, whole in both:
        assert kept == pytest.approx([target - (target - 1) * BETA**1000], abs=1e-12)
        assert whole == pytest.approx([1.019994, 1.019994], abs=1e-6)


def test_the_average_of_two_sharded_ranks_is_that_of_their_weights(two_ranks, model, tmp_path):
    """Under ZeRO-3: kept in parts, saved and loaded bit for bit, exported whole."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    batches = [cases.experiences(seed=seed) for seed in range(3)]

    both = two_ranks.run(averaged, model, batches, [ZERO_3], tmp_path)

    (seen, first, _, whole), (_, second, _, _) = both
    expected = {name: weight.astype(np.float64) for name, weight in seen[0].items()}
    for later in seen[1:]:
        expected = {name: BETA * old + (1 - BETA) * later[name].astype(np.float64) for name, old in expected.items()}
    assert first.keys() | second.keys() == expected.keys()
    assert not first.keys() & second.keys()
    for name, kept in {**first, **second}.items():
        np.testing.assert_allclose(kept, expected[name], rtol=0, atol=1e-12)
    for _, own, restored, _ in both:
        assert all(np.array_equal(own[name], restored[name]) for name in own)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf_ema")
    for name, weight in exported.named_parameters():
        np.testing.assert_array_equal(weight.detach().numpy(), whole[name])
        np.testing.assert_array_equal(whole[name], expected[name].astype(np.float32))
    assert AutoTokenizer.from_pretrained(tmp_path / "hf_ema").decode([72, 105]) == "Hi"


@pytest.mark.parametrize("stage", [ZERO_0, ZERO_2])
def test_the_average_moves_where_bf16_weights_do_not(one_rank, model, rows, tmp_path, stage):
    """Steps of 5e-4 around 1, where bf16 has no number within .0019: masters and average move, the weights do not."""
    [(seen, own, _, whole)] = one_rank.run(averaged, model, [rows] * 2, [BF16, stage, "actor.adam.lr=5e-4"], tmp_path)

    norm = "model.norm.weight"
    moved = own[norm] - 1
    assert (seen[-1][norm] != 1).any()
    assert 1e-7 < np.abs(moved).max() < 2e-5
    assert (whole[norm] == 1).all()


def test_an_average_does_not_begin_in_the_middle_of_a_run(one_rank, model, rows, tmp_path):
    [message] = one_rank.run(restored_without, model, rows, tmp_path)

    assert "has no moving average: it was written with train.enable_ema=false" in message
