"""Adapters on real ranks. By hand, of a matrix with gradient G in the plain model: dB = s G Aᵀ, dA = s Bᵀ G."""

from __future__ import annotations

import json

import numpy as np
import pytest
import test_training_critic as critics
import test_training_supervised as supervised
import torch
import training_cases as cases

pytestmark = pytest.mark.pipeline

RANK, ALPHA = 4, 8
LORA = (f"ds.lora.rank={RANK}", f"ds.lora.alpha={ALPHA}", "actor.adam.lr=0.01")
ZERO_0, ZERO_1, ZERO_2, ZERO_3 = (f"ds.zero_stage={stage}" for stage in range(4))
BF16, PACKED = "ds.param_dtype=bf16", "ds.packing_samples=true"
DIVIDED = (PACKED, "ds.sequence_parallel_size=2")
MUON = ("actor.optim=muon", "actor.max_norm=1")
CHECKPOINTING = "actor.gradient_checkpointing_enable=true"
# Of the tiny model's 2 layers: q, k, v, o, gate, up, down, [out, in] each.
TRAINED = 2 * RANK * (4 * (128 + 128) + 3 * (256 + 128))


@pytest.fixture(scope="module")
def model(tiny_model):
    return str(tiny_model)


@pytest.fixture(scope="module")
def rows():
    return cases.experiences()


def plain_name(name):
    """(name of the matrix, "A" or "B")."""
    matrix, _, factor = name.partition(".lora_")
    return f"{matrix}.weight", factor[0]


# --- what the ranks run


def weights_of(trainer):
    """fp32 masters by name."""
    from rlhf_core.training.weights import master_weights

    masters = master_weights(trainer.hf_model, trainer.engine.optimizer)
    return {name: weight.detach().cpu().float().numpy().copy() for name, weight in masters}


def gradients(rank, model, rows, overrides, folder):
    """After one update, which B = 0 does not outlive: the factors and their gradients, and an export of the plain model."""
    from deepspeed.utils import safe_get_full_grad

    trainer = cases.make_trainer(rank, model, [*LORA, *overrides])
    trainer.update(rows, 0)
    trainer.export_hf(folder)
    [step] = trainer.plan(rows, iteration=1)
    trainer.engine.train()
    trainer.accumulate(step, rows, kl_coef=0.0)
    found = {
        name: safe_get_full_grad(p).detach().cpu().numpy().copy()
        for name, p in trainer.hf_model.named_parameters()
        if p.requires_grad
    }
    return weights_of(trainer), found


def three_updates(rank, model, overrides):
    from rlhf_core.training.fragments import inner_optimizer

    trainer = cases.make_trainer(rank, model, [*LORA, *overrides])
    first = trainer.weight_digest()
    before = weights_of(trainer)
    digests = []
    for k in range(3):
        trainer.update(cases.experiences(seed=k), k)
        digests.append(trainer.weight_digest())
    states = inner_optimizer(trainer.engine.optimizer).state.values()
    optimized = sum(state["exp_avg"].numel() for state in states)
    return first, optimized, before, weights_of(trainer), digests


def exported(rank, model, rows, overrides, folder):
    """Everything that can be written, and the log-probs of who wrote it."""
    trainer = cases.make_trainer(rank, model, [*LORA, *overrides, "train.enable_ema=true", "train.ema_beta=0.5"])
    averages = [weights_of(trainer)]
    for k in range(2):
        trainer.update(rows, k)
        averages.append(weights_of(trainer))
    trainer.export_hf(folder / "hf")
    trainer.export_average(folder / "hf_ema")
    trainer.export_adapter(folder / "adapter")
    trainer.save(folder / "state")
    sent = {name: weight.float().cpu().numpy().copy() for name, weight in trainer.named_weights()}
    described = [(meta.name, str(meta.dtype), meta.shape) for meta in trainer.weight_metadata()]
    return trainer.logprobs(rows), sent, described, averages


def load_error(rank, model, folder, overrides):
    from rlhf_core.errors import TrainingError

    try:
        cases.make_trainer(rank, model, overrides).load(folder)
    except TrainingError as error:
        return str(error)
    raise AssertionError("it was loaded")


def critic_update(rank, model, rows, overrides):
    trainer = critics.make_critic(rank, model, [*LORA, *overrides])
    before = weights_of(trainer)
    trainer.update(rows, 0)
    return before, weights_of(trainer)


def learns(rank, method, models, batches):
    """The evaluation before and after, and what moved."""
    trainer = supervised.make_trainer(rank, method, models, [*LORA[:2], "model.adam.lr=0.01", "ds.lora.dropout=0.1"])
    before, held_out = weights_of(trainer), batches[0]
    first = trainer.evaluate(held_out)["eval/loss"]
    trainer.train_steps(batches)
    after = weights_of(trainer)
    return first, trainer.evaluate(held_out)["eval/loss"], moved(before, after)


# --- what they show


def moved(before, after):
    return {name for name, weight in before.items() if not np.array_equal(weight, after[name])}


@pytest.mark.parametrize(
    "overrides",
    [
        (ZERO_0,),
        (ZERO_1, PACKED, "train.micro_batch_size=3"),
        (ZERO_2, CHECKPOINTING, "train.micro_batch_size=2"),
        (ZERO_3, CHECKPOINTING, PACKED, "train.micro_batch_size=4"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_those_of_the_plain_model_by_the_chain_rule(
    one_rank, two_ranks, model, rows, tmp_path, ranks, overrides
):
    answers = {1: one_rank, 2: two_ranks}[ranks].run(gradients, model, rows, overrides, tmp_path)
    plain = cases.naive_gradient(tmp_path, rows)  # at the merged weights

    for weights, found in answers:
        assert sum(gradient.size for gradient in found.values()) == TRAINED
        assert max(np.abs(gradient).max() for gradient in found.values()) > 1e-3
        for name, gradient in found.items():
            matrix, factor = plain_name(name)
            a, b = (weights[name.replace(f"lora_{factor}", f"lora_{other}")] for other in "AB")
            expected = plain[matrix] @ a.T if factor == "B" else b.T @ plain[matrix]
            np.testing.assert_allclose(gradient, ALPHA / RANK * expected, atol=2e-6)


@pytest.mark.parametrize("overrides", [(ZERO_0,), (ZERO_0, BF16), (ZERO_1,), (ZERO_2, BF16), (ZERO_3,), (ZERO_3, BF16)])
def test_only_adapters_have_optimizer_states_and_move(one_rank, model, overrides):
    [(_, optimized, before, after, _)] = one_rank.run(three_updates, model, overrides)

    assert optimized == TRAINED
    assert moved(before, after) == {name for name in before if ".lora_" in name}
    assert sum(before[name].size for name in moved(before, after)) == TRAINED


@pytest.mark.parametrize("overrides", [(ZERO_2,), (ZERO_3,), (ZERO_3, *DIVIDED, "ds.adam_offload=true")])
def test_two_ranks_begin_as_one_and_learn_as_one(one_rank, two_ranks, model, overrides):
    [(alone, _, _, expected, _)] = one_rank.run(three_updates, model, overrides[:1])

    for first, _, _, weights, digests in (answers := two_ranks.run(three_updates, model, overrides)):
        assert first == alone
        assert digests == answers[0][-1]
        for name, weight in expected.items():
            np.testing.assert_allclose(weights[name], weight, atol=1e-4)  # AdamW makes 0.01 of the smallest gradient


@pytest.mark.parametrize(
    "overrides",
    [
        (ZERO_0,),
        (ZERO_2, BF16),
        (ZERO_3,),
        (ZERO_2, "ds.use_universal_ckpt=true"),
        (ZERO_1, "train.enable_ema=true"),
        (ZERO_2, *MUON),
        (ZERO_3, BF16, *MUON),
    ],
)
def test_a_restored_run_goes_on_bit_for_bit_case_14(one_rank, model, tmp_path, overrides):
    batches = [cases.experiences(seed=seed) for seed in range(4)]
    overrides = (*LORA, *overrides, "actor.lr_scheduler=linear", "train.batch_size=4")
    [(straight, digests)] = one_rank.run(cases.updates, model, batches, overrides)

    [(reports, digest, counters)] = one_rank.run(cases.continued, model, batches, overrides, tmp_path)

    assert digest == digests[-1]
    assert [r.policy_loss for r in reports] == [r.policy_loss for r in straight[2:]]
    assert counters == (4, 8)


@pytest.mark.parametrize("stage", [ZERO_2, ZERO_3])
def test_exports_say_what_the_trainer_says(two_ranks, model, rows, tmp_path, stage):
    """The plain model, the adapters on the model of the beginning, and the average: each by the library that it is for."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    shares = two_ranks.run(exported, model, rows, (stage,), tmp_path)
    logprobs = shares[0][0] | shares[1][0]
    _, sent, described, averages = shares[0]

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    began = AutoModelForCausalLM.from_pretrained(model)
    assert described == [(name, str(p.dtype), tuple(p.shape)) for name, p in began.named_parameters()]
    assert all(np.array_equal(p.detach(), sent[name]) for name, p in plain.named_parameters())
    for loaded in (plain, PeftModel.from_pretrained(began, str(tmp_path / "adapter"))):
        for i, row in enumerate(rows):
            [(start, end)] = row.action_ranges
            with torch.no_grad():
                np.testing.assert_allclose(logprobs[i][start:end], cases.naive_logprobs(loaded, row), atol=1e-5)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == model

    average = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "hf_ema").named_parameters())
    name = "model.layers.1.mlp.up_proj"
    factors = [
        np.average([w[f"{name}.lora_{factor}.default.weight"] for w in averages], axis=0, weights=[1, 1, 2])
        for factor in "BA"
    ]
    expected = averages[0][f"{name}.base_layer.weight"] + ALPHA / RANK * factors[0] @ factors[1]
    np.testing.assert_allclose(average[f"{name}.weight"].detach(), expected, atol=1e-5)
    np.testing.assert_array_equal(
        average["model.embed_tokens.weight"].detach(), averages[0]["model.embed_tokens.weight"]
    )


def test_a_checkpoint_of_other_adapters_says_so(one_rank, model, rows, tmp_path):
    one_rank.run(exported, model, rows, (ZERO_2,), tmp_path)

    [rank] = one_rank.run(load_error, model, tmp_path / "state", [])
    [layers] = one_rank.run(load_error, model, tmp_path / "state", [*LORA, "ds.lora.target_modules=q_proj"])

    assert f"was written with lora_rank={RANK}, this run has 0: restore ds.lora.rank" in rank
    assert "the checkpoint is of another model, or of other adapters: backbone.layers.0.mlp.down_proj" in layers


def test_a_checkpoint_does_not_hold_the_frozen_matrices(one_rank, model, rows, tmp_path):
    one_rank.run(exported, model, rows, (ZERO_2,), tmp_path)

    [file] = (tmp_path / "state" / "deepspeed").rglob("mp_rank_00_model_states.pt")
    saved = torch.load(file, weights_only=False)["module"]

    assert all(".lora_" in name for name in saved)  # nor the embedding, which is the output layer too
    assert sum(value.numel() for value in saved.values()) == TRAINED


@pytest.mark.parametrize("stage", [ZERO_2, ZERO_3])
def test_a_critic_learns_by_its_head_and_adapters(two_ranks, model, rows, stage):
    (before, after), _ = two_ranks.run(critic_update, model, critics.valued(rows), (stage,))
    (_, later), _ = two_ranks.run(critic_update, model, critics.valued(rows), (stage, "train.max_epochs=3"))

    assert moved(before, after) == {"score.weight"}  # whose 0 lets no gradient through, in the first step
    assert moved(after, later) == {name for name in before if ".lora_" in name or name == "score.weight"}


@pytest.mark.parametrize("method", ["sft", "reward_model", "dpo"])
def test_supervised_training_by_adapters_learns(one_rank, tiny_model, tmp_path, method):
    """With dropout, which an evaluation does without: it is the same before the first step as without adapters."""
    models = {
        "sft": str(tiny_model),
        "dpo": str(tiny_model),
        "reference": str(tiny_model),
        "reward_model": supervised.saved_classifier(tmp_path, tiny_model),
    }
    examples = supervised.examples_of(method)

    [(first, last, names)] = one_rank.run(learns, method, models, [examples] * 8)

    assert last < 0.9 * first
    head = {"score.weight"} if method == "reward_model" else set()
    assert {name for name in names if ".lora_" not in name} == head
    assert len(names - head) == 2 * 2 * 7
