"""One model whose layers are divided over two ranks, or over each two of four, against one rank: what it says, learns, sends,
saves and goes on from.

Ranks of its own: DeepSpeed keeps the groups for the life of a process, and every later model in it would use them.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import training_cases as cases

from rlhf_core.errors import TrainingError

pytestmark = pytest.mark.pipeline

HALVES = "ds.tensor_parallel_size=2"
TWO_RANKS = ["actor.num_gpus_per_node=2", "ref.num_gpus_per_node=2"]
UNIVERSAL = "ds.use_universal_ckpt=true"
# AdamW divides a gradient by its own size: with a small eps it makes of rounding what it makes of a gradient.
SMOOTH = "actor.adam.eps=1e-3"
CLIPPED = [SMOOTH, "actor.max_norm=0.05"]


@pytest.fixture(scope="module")
def ranks():
    pool = cases.RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def four_ranks():
    pool = cases.RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def model(tiny_model):
    return str(tiny_model)


def rows_of(*seeds):
    return [cases.experiences(seed=seed) for seed in seeds]


def whole_gradient(rank, model, rows, overrides):
    from deepspeed.utils import safe_get_full_grad

    from rlhf_core.training.tensor_parallel import whole_of

    trainer = cases.make_trainer(rank, model, overrides)
    [step] = trainer.plan(rows, iteration=0)
    trainer.engine.train()
    trainer.accumulate(step, rows, kl_coef=0.0)
    parameters = trainer.hf_model.named_parameters()
    return {name: whole_of(p, safe_get_full_grad(p)).detach().numpy() for name, p in parameters}


@pytest.mark.parametrize(
    "settings",
    [
        ["ds.zero_stage=0", "actor.gradient_checkpointing_enable=true"],
        ["ds.zero_stage=1", "train.micro_batch_size=3"],
        ["ds.zero_stage=2", "ds.packing_samples=true"],
    ],
)
def test_divided_layers_give_the_gradient_of_whole_ones(ranks, model, settings):
    rows = cases.experiences()

    both = ranks.run(whole_gradient, model, rows, [HALVES, *settings])

    expected = cases.naive_gradient(model, rows)
    assert all(cases.largest_difference(gradient, expected) < 1e-6 for gradient in both)


def learned(rank, model, batches, overrides):
    """Reports, digest, whole weights by name, and this rank's own copy of what no rank has a part of."""
    from rlhf_core.training.tensor_parallel import cut_of

    trainer = cases.make_trainer(rank, model, overrides)
    reports = [trainer.update(rows, iteration) for iteration, rows in enumerate(batches)]
    weights = {name: weight.numpy().copy() for name, weight in trainer.named_weights()}
    metadata = [(meta.name, tuple(meta.shape)) for meta in trainer.weight_metadata()]
    assert metadata == [(name, weight.shape) for name, weight in weights.items()]
    copies = {n: p.detach().numpy().copy() for n, p in trainer.hf_model.named_parameters() if cut_of(p) is None}
    return reports, trainer.weight_digest(), weights, copies


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_loss_norm_and_weights_are_those_of_one_rank(ranks, one_rank, model, stage):
    batches, settings = rows_of(0, 1, 2), [*CLIPPED, f"ds.zero_stage={stage}"]

    answers = ranks.run(learned, model, batches, [HALVES, *settings])

    check_learned(answers, one_rank.run(learned, model, batches, settings))
    first, second = ([report.grad_norm for report in reports] for reports, *_ in answers)
    assert first == second


def check_learned(answers, one_rank_answers):
    """Gradients are clipped to a fifth of their norm or less: a norm that counts anything twice changes the weights."""
    [(alone, _, expected, _)] = one_rank_answers
    assert min(report.grad_norm for report in alone) > 0.25
    first, digest, weights, copies = answers[0]
    for reports, other_digest, _, other_copies in answers:
        assert [report.policy_loss for report in reports] == [report.policy_loss for report in first]
        for ours, reference in zip(reports, alone, strict=True):
            assert ours.num_tokens == reference.num_tokens
            assert ours.policy_loss == pytest.approx(reference.policy_loss, abs=1e-6)
            assert ours.grad_norm == pytest.approx(reference.grad_norm, rel=1e-6)
        assert other_digest == digest
        assert all(np.array_equal(copies[name], other_copies[name]) for name in copies)
    assert list(weights) == list(expected)
    assert max(np.abs(weights[name] - expected[name]).max() for name in expected) < 1e-6
    assert {name for name in copies if "proj" in name} == set()


@pytest.mark.examples
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_two_groups_of_two_ranks_learn_as_one_rank_does(four_ranks, one_rank, model, tmp_path, stage):
    """Every group has half of the rows, every rank of it half of each layer. And they go on from a checkpoint."""
    batches, settings = rows_of(0, 1, 2), [*CLIPPED, f"ds.zero_stage={stage}"]

    answers = four_ranks.run(learned, model, batches, [HALVES, *settings])

    check_learned(answers, one_rank.run(learned, model, batches, settings))
    for more in ([], [UNIVERSAL]):
        for reports, digest, counts in four_ranks.run(
            cases.continued, model, batches, [HALVES, *settings, *more], tmp_path / str(len(more))
        ):
            assert counts == (3, 3)
            assert digest == answers[0][1]
            assert [r.policy_loss for r in reports] == [r.policy_loss for r in answers[0][0][1:]]


@pytest.mark.parametrize("stage", [1, 2])
def test_an_optimizer_in_host_memory_learns_the_same(ranks, one_rank, model, tmp_path, stage):
    batches, settings = rows_of(0, 1, 2), [*CLIPPED, f"ds.zero_stage={stage}"]
    moved = [HALVES, *settings, "ds.adam_offload=true"]

    answers = ranks.run(learned, model, batches, moved)

    check_learned(answers, one_rank.run(learned, model, batches, settings))
    for _, digest, counts in ranks.run(cases.continued, model, batches, moved, tmp_path):
        assert counts == (3, 3)
        assert digest == answers[0][1]


@pytest.mark.parametrize("more", [["ds.zero_stage=0"], ["ds.zero_stage=1"], ["ds.zero_stage=2", "ds.param_dtype=bf16"]])
def test_turns_on_the_device_change_no_bit(ranks, model, more):
    """``ds.enable_sleep``: the engines work between the stages of an iteration."""
    settings, batches = [HALVES, *more], rows_of(0, 1)
    straight = ranks.run(cases.updates, model, batches, settings)

    turns = ranks.run(cases.taking_turns, model, batches, settings)

    for (digests, _, away), (_, expected) in zip(turns, straight, strict=True):
        assert digests == expected
        assert away[-1] > away[0] > 0


@pytest.mark.parametrize("stage", [0, 2])
def test_a_divided_reference_in_host_memory_scores_as_another(ranks, model, stage):
    rows, settings = cases.experiences(), [HALVES, f"ds.zero_stage={stage}", *TWO_RANKS]
    [expected, _] = ranks.run(cases.reference_logprobs, model, rows, settings)

    [(passes, away), _] = ranks.run(cases.reference_between_passes, model, rows, settings)

    assert all(np.array_equal(found[i], expected[i]) for found in passes for i in expected)
    assert min(away) > 0


def first_weights(rank, model, overrides, folder):
    trainer = cases.make_trainer(rank, model, overrides)
    trainer.export_hf(folder)
    return trainer.weight_digest()


def test_initial_weights_and_exports_are_the_whole_model(ranks, one_rank, model, tmp_path):
    from safetensors.torch import load_file

    digests = ranks.run(first_weights, model, [HALVES], tmp_path / "halves")

    assert digests == 2 * one_rank.run(first_weights, model, [], tmp_path / "whole")
    halves, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("halves", "whole"))
    assert halves.keys() == whole.keys()
    assert all(torch.equal(halves[name], whole[name]) for name in whole)


def saved(rank, model, rows, overrides, folder):
    trainer = cases.make_trainer(rank, model, overrides)
    trainer.update(rows, 0)
    trainer.save(folder)
    return trainer.weight_digest()


def gone_on(rank, model, rows, overrides, folder):
    """Digest as loaded, and the report of the update after it."""
    trainer = cases.make_trainer(rank, model, overrides)
    trainer.load(folder)
    return trainer.weight_digest(), trainer.update(rows, 1), trainer.optimizer_steps


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_one_rank_goes_on_from_divided_layers_and_back(ranks, one_rank, model, tmp_path, stage):
    """Another ZeRO stage too: fragments of parts become fragments of whole parameters, moments among them."""
    settings, (first, second) = [SMOOTH, UNIVERSAL, "train.enable_ema=true"], rows_of(0, 1)
    halves = [HALVES, *settings, f"ds.zero_stage={stage}"]
    whole = [*settings, f"ds.zero_stage={3 - stage}"]

    for write, read in (((ranks, halves), (one_rank, whole)), ((one_rank, whole), (ranks, halves))):
        folder = tmp_path / str(len(read[1]))
        digests = write[0].run(saved, model, first, write[1], folder)
        [(kept, expected, _), *_] = write[0].run(gone_on, model, second, write[1], folder)

        for digest, report, steps in read[0].run(gone_on, model, second, read[1], folder):
            assert digest == kept == digests[0]
            assert steps == 2
            assert report.policy_loss == pytest.approx(expected.policy_loss, abs=1e-6)
            assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)


@pytest.mark.parametrize("more", [["ds.zero_stage=0"], ["ds.zero_stage=1"], ["ds.zero_stage=2", UNIVERSAL]])
def test_a_run_goes_on_bit_for_bit(ranks, model, tmp_path, more):
    settings, batches = [HALVES, "train.enable_ema=true", *more], rows_of(0, 1, 2)

    [(reports, digests), _] = ranks.run(cases.updates, model, batches, settings)

    for continued, digest, counts in ranks.run(cases.continued, model, batches, settings, tmp_path):
        assert counts == (3, 3)
        assert digest == digests[-1]
        assert [report.policy_loss for report in continued] == [report.policy_loss for report in reports[1:]]


def refused_load(rank, model, folder, overrides):
    try:
        cases.make_trainer(rank, model, overrides).load(folder)
    except TrainingError as error:
        return str(error)
    raise AssertionError("it is not refused")


def test_a_plain_checkpoint_keeps_its_division(ranks, one_rank, model, tmp_path):
    ranks.run(saved, model, cases.experiences(), [HALVES], tmp_path)

    [said] = one_rank.run(refused_load, model, tmp_path, [])

    assert "was written with world_size=2, this run has 1" in said


def test_bf16_learns_as_one_rank_does(ranks, one_rank, model):
    batches, settings = rows_of(0, 1), ["ds.param_dtype=bf16", "ds.zero_stage=1"]
    [(alone, _)] = one_rank.run(cases.updates, model, batches, settings)

    (first, digests), (_, others) = ranks.run(cases.updates, model, batches, [HALVES, *settings])

    assert digests == others
    assert [r.policy_loss for r in first] == pytest.approx([r.policy_loss for r in alone], abs=2e-3)
    assert [r.grad_norm for r in first] == pytest.approx([r.grad_norm for r in alone], rel=2e-2)


def test_the_reference_is_divided_and_answers_once(ranks, one_rank, model):
    rows = [cases.experience(index, 3 + index) for index in range(4)]

    first, second = ranks.run(cases.reference_logprobs, model, rows, [HALVES, *TWO_RANKS])

    [whole] = one_rank.run(cases.reference_logprobs, model, rows)
    assert sorted(first) == [0, 1, 2, 3]
    assert second == {}
    for index, logprobs_T in whole.items():
        np.testing.assert_allclose(first[index], logprobs_T, atol=1e-6)


def make_model(kind):
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        MistralConfig,
        MistralForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    torch.manual_seed(0)
    if kind == "biases":
        model = Qwen2ForCausalLM(Qwen2Config(**cases.SIZES))
    elif kind == "norms of heads":
        model = Qwen3ForCausalLM(Qwen3Config(**cases.SIZES, head_dim=4))
    elif kind == "window":
        model = MistralForCausalLM(MistralConfig(**cases.SIZES, sliding_window=4))
    elif kind == "values":
        model = LlamaForSequenceClassification(LlamaConfig(**cases.SIZES, num_labels=1))
    else:
        more = {"attention_bias": True, "mlp_bias": True} if kind == "biases of rows" else {}
        model = LlamaForCausalLM(LlamaConfig(**cases.SIZES, **more))
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "_norm" in name:
            torch.nn.init.normal_(parameter, 1.0 * ("_norm" in name), 0.3)
    return model


def loss_and_gradient(rank, kind, divided):
    from dataclasses import replace

    from rlhf_core.training.model import TokenScorer
    from rlhf_core.training.tensor_parallel import divide_layers, whole_of
    from rlhf_core.training.value_model import ValueScorer

    model = make_model(kind)
    scorer = ValueScorer(model) if kind == "values" else TokenScorer(model, 4)
    if divided:
        divide_layers(model, replace(rank, tensor_parallel_size=2))
    if kind == "values":
        loss = (scorer(cases.IDS_BT, cases.ACTIONS_BT) * torch.arange(9) / 9).sum()
    else:
        scores = scorer(cases.IDS_BT, cases.ACTIONS_BT, torch.tensor([0.7, 1.0, 1.3]), want_entropy=True)
        loss = (scores.logprobs_BT + 0.1 * scores.entropy_BT).sum()
    loss.backward()
    parameters = scorer.named_parameters()
    return loss.item(), {name: whole_of(p, p.grad).numpy() for name, p in parameters if p.grad is not None}


@pytest.mark.parametrize("kind", ["values", "biases", "biases of rows", "norms of heads", "window"])
def test_every_kind_of_layer_is_divided(ranks, one_rank, kind):
    [(loss, gradient)] = one_rank.run(loss_and_gradient, kind, False)

    for divided_loss, divided in ranks.run(loss_and_gradient, kind, True):
        assert divided_loss == pytest.approx(loss, rel=1e-6)
        assert cases.largest_difference(divided, gradient) < 1e-5


def refusal(rank, activation):
    from dataclasses import replace

    from rlhf_core.training.tensor_parallel import divide_layers

    model = make_model("plain")
    for layer in model.model.layers:
        layer.mlp.act_fn = activation()
    try:
        divide_layers(model, replace(rank, tensor_parallel_size=2))
    except TrainingError as error:
        return str(error)
    raise AssertionError("it is not refused")


class Cumulated(torch.nn.Module):
    """Columns of an MLP that depend on each other."""

    def forward(self, hidden_BTF):
        return hidden_BTF.cumsum(-1)


class Scaled(torch.nn.Module):
    """As many numbers as an MLP has columns, which no plan knows of."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale_F", torch.ones(cases.SIZES["intermediate_size"]))

    def forward(self, hidden_BTF):
        return hidden_BTF * self.scale_F


@pytest.mark.parametrize(
    ("activation", "said"),
    [
        (Cumulated, "LlamaForCausalLM answers otherwise when its layers are divided over ranks"),
        (Scaled, "LlamaForCausalLM does not compute with a part of its layers"),
    ],
)
def test_a_model_that_answers_otherwise_is_refused_by_name(ranks, activation, said):
    assert all(said in message for message in ranks.run(refusal, activation))
