"""Packed rows change nothing but the work: log-probs, losses and gradients are those of padded ones."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
import training_batches as tb
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BambaConfig,
    Gemma3TextConfig,
    GPT2Config,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PhiConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from rlhf_core.batching import collate_experiences, plan_update
from rlhf_core.errors import TrainingError
from rlhf_core.records import ActionRange
from rlhf_core.training import packed_attention
from rlhf_core.training.loading import load_causal_lm
from rlhf_core.training.model import TokenScorer
from rlhf_core.training.objective import micro_batch_loss
from rlhf_core.training.packed_attention import PACKED_SDPA
from rlhf_core.training.packing import refuse_leaks
from rlhf_core.training.value_model import SequenceScorer, ValueScorer

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 64, "initializer_range": 0.3}
MODELS = {
    "llama": LlamaConfig(**SIZES),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES),
    "gpt2": GPT2Config(**GPT2, bos_token_id=1, eos_token_id=2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
    "bias": PhiConfig(**{**SIZES, "num_key_value_heads": 2, "partial_rotary_factor": 0.5}),
    "sliding window": MistralConfig(**SIZES, sliding_window=4),
    "some layers with a sliding window": Gemma3TextConfig(
        **SIZES, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
    "mixture of experts": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}
LINEAR = {"linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
LEAKING = {
    "gated delta rule": Qwen3NextConfig(
        **SIZES, **LINEAR, **EXPERTS, layer_types=["linear_attention", "full_attention"]
    ),
    "convolution": Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
    "state space": BambaConfig(
        **SIZES, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8
    ),
}
DEVICE = torch.device("cpu")


def both(config, auto_class=AutoModelForCausalLM):
    """The same weights, to be fed padded and packed rows."""
    models = []
    for attention in ("sdpa", PACKED_SDPA):
        torch.manual_seed(0)
        models.append(auto_class.from_config(deepcopy(config), attn_implementation=attention))
    return models


def rows(**changes):
    """Segments of three episodes, whose lengths differ: the first one's are rows 0 and 2; row 3 goes on after its last action.

    | row | episode | tokens | actions          |
    |-----|---------|--------|------------------|
    | 0   | a       | 12     | [5, 8), [10, 12) |
    | 1   | b       | 3      | [1, 3)           |
    | 2   | a       | 7      | [6, 7)           |
    | 3   | c       | 9      | [1, 4)           |
    """
    shapes = [("a", 12, [(5, 8), (10, 12)]), ("b", 3, [(1, 3)]), ("a", 7, [(6, 7)]), ("c", 9, [(1, 4)])]
    rng = np.random.default_rng(0)
    made = []
    for episode, length, ranges in shapes:
        on_T = np.zeros(length, np.float32)
        for start, end in ranges:
            on_T[start:end] = 1
        old_T = (-3 + 0.3 * rng.standard_normal(length)).astype(np.float32) * on_T
        made.append(
            replace(
                tb.experience([-1.0]),
                group_id=episode,
                token_ids=rng.integers(1, 64, length).astype(np.int32),
                action_ranges=tuple(ActionRange(start, end) for start, end in ranges),
                old_logprobs=old_T,
                rollout_logprobs=old_T + (0.1 * rng.standard_normal(length)).astype(np.float32) * on_T,
                ref_logprobs=old_T - 0.2 * on_T,
                advantages=(rng.standard_normal(length) * on_T).astype(np.float32),
                returns=0 * on_T,
                **changes,
            )
        )
    return made


def step_gradient(model, packs, settings, checkpointing=False):
    """Loss and gradient of one optimizer step over the rows, in micro-batches of three: as ``PolicyTrainer`` takes it."""
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    made, config = rows(temperature=0.7), tb.config(*settings)
    scorer = TokenScorer(model, chunk=2, packs=packs, balance_experts=config.actor.aux_loss_coef > 0).train()
    [step] = plan_update(
        [len(row.token_ids) for row in made],
        [row.num_actions for row in made],
        world_size=1,
        samples_per_step=8,
        max_epochs=1,
        seed=0,
        iteration=0,
        micro_batch_size=4 if config.actor.aux_loss_coef else 3,
        packed=packs,
        episodes=[row.group_id for row in made],
    )
    total = torch.zeros(())
    for micro_batch in step.micro_batches[0]:
        batch = collate_experiences([made[i] for i in micro_batch.rows])
        tokens = batch.tokens
        scores = scorer(tokens.input_ids_BT, tokens.action_mask_BT, tokens.temperature_B, want_entropy=True)
        episode_tokens = torch.tensor([step.episode_tokens.get(i, made[i].num_actions) for i in micro_batch.rows])
        loss = micro_batch_loss(config, step, batch, scores, 0.1, episode_tokens).loss
        loss.backward()
        total += loss.detach()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours, expected):
    torch.testing.assert_close(ours[0], expected[0], atol=1e-6, rtol=1e-6)
    assert ours[1].keys() == expected[1].keys()
    largest = max(float(gradient.abs().max()) for gradient in expected[1].values())
    assert largest > 1e-2
    for name, gradient in ours[1].items():
        assert float((gradient - expected[1][name]).abs().max()) < 1e-6 * max(largest, 1), name


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_padded_rows(name):
    batch = collate_experiences(rows()).tokens
    padded, packed = (
        TokenScorer(model.eval(), 3, packs=packs)(
            batch.input_ids_BT, batch.action_mask_BT, batch.temperature_B, want_entropy=True
        )
        for model, packs in zip(both(MODELS[name]), (False, True), strict=True)
    )

    torch.testing.assert_close(packed.logprobs_BT, padded.logprobs_BT, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(packed.entropy_BT, padded.entropy_BT, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_gradient_is_that_of_padded_rows(name):
    settings = ["actor.entropy_coef=0.1", "algo.kl.use_loss=true", "algo.kl.init_coef=0.1"]
    padded, packed = both(MODELS[name])

    assert_same(step_gradient(packed, True, settings), step_gradient(padded, False, settings))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        ["actor.loss_agg_mode=token"],
        ["actor.loss_agg_mode=sample"],
        ["algo.advantage.estimator=dr_grpo", "algo.dr_grpo_length=8"],
        ["actor.policy_loss_type=gspo", "actor.loss_agg_mode=sample"],
        ["algo.advantage.is_correction_enable=true", "algo.advantage.is_correction_type=seq-mask-tis"],
    ],
    ids=["token", "sample", "constant_length", "gspo", "per-row correction"],
)
def test_no_way_to_add_up_losses_sees_a_difference(settings, checkpointing):
    padded, packed = both(MODELS["llama"])

    assert_same(step_gradient(packed, True, settings, checkpointing), step_gradient(padded, False, settings))


def test_balancing_loss_counts_the_same_tokens():
    settings = ["actor.aux_loss_coef=0.5"]
    padded, packed = both(MODELS["mixture of experts"])

    assert_same(step_gradient(packed, True, settings), step_gradient(padded, False, settings))


def test_backbone_gets_each_token_that_matters_once():
    """Row 3 ends with 5 tokens that nothing depends on."""
    batch = collate_experiences(rows()).tokens
    scorer = TokenScorer(both(MODELS["llama"])[1], chunk=8, packs=True)
    seen = []
    scorer.backbone.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)

    scorer(batch.input_ids_BT, batch.action_mask_BT, batch.temperature_B, want_entropy=False)

    [got] = seen
    assert got["input_ids"].tolist() == [[int(i) for row in rows() for i in row.token_ids][: 12 + 3 + 7 + 4]]
    assert got["position_ids"].tolist() == [[*range(12), *range(3), *range(7), *range(4)]]
    assert got["cu_seq_lens_q"].tolist() == [0, 12, 15, 22, 26]


def test_attention_computes_no_score_between_samples(monkeypatch):
    """Its work is the sum of the squares, not the square of the sum."""
    batch = collate_experiences(rows()).tokens
    scorer = TokenScorer(both(MODELS["llama"])[1], chunk=8, packs=True)
    shapes, attend = [], packed_attention.sdpa_attention_forward

    def watched(module, query, key, *others, **settings):
        shapes.append((query.shape[2], key.shape[2]))
        return attend(module, query, key, *others, **settings)

    monkeypatch.setattr(packed_attention, "sdpa_attention_forward", watched)
    scorer(batch.input_ids_BT, batch.action_mask_BT, batch.temperature_B, want_entropy=False)

    assert shapes == [(12, 12), (3, 3), (7, 7), (4, 4)] * SIZES["num_hidden_layers"]


def test_batch_without_actions_keeps_its_graph():
    model = both(MODELS["llama"])[1]
    ids_BT, none_BT = torch.ones((2, 3), dtype=torch.long), torch.zeros((2, 3), dtype=torch.bool)

    scores = TokenScorer(model, chunk=8, packs=True)(ids_BT, none_BT, torch.ones(2), want_entropy=True)
    scores.logprobs_BT.sum().backward()

    assert not scores.logprobs_BT.any()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixture of experts"])
def test_values_and_sequence_scores_are_those_of_padded_rows(name):
    config = MODELS[name]
    config.num_labels = 1
    batch, lengths_B = collate_experiences(rows()).tokens, torch.tensor([12, 3, 7, 5])
    results = []
    for model, packs in zip(both(config, AutoModelForSequenceClassification), (False, True), strict=True):
        values = ValueScorer(model, packs)(batch.input_ids_BT, batch.action_mask_BT)
        scores = SequenceScorer(model, packs)(batch.input_ids_BT, lengths_B)
        (values.square().sum() + scores.square().sum()).backward()
        results.append((values.detach(), scores.detach(), [p.grad for p in model.parameters()]))

    (values, scores, gradients), (packed_values, packed_scores, packed_gradients) = results
    torch.testing.assert_close(packed_values, values, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(packed_scores, scores, atol=1e-5, rtol=1e-5)
    for ours, expected in zip(packed_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_model_that_keeps_samples_apart_is_taken(name, dtype):
    scorer = TokenScorer(both(MODELS[name])[1].to(dtype), chunk=8, packs=True)

    refuse_leaks(scorer, scorer, DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LEAKING)
def test_model_that_carries_a_state_from_sample_to_sample_is_refused(name, dtype):
    scorer = TokenScorer(both(LEAKING[name])[1].to(dtype), chunk=8, packs=True)

    with pytest.raises(
        TrainingError, match="from one sample of a packed row to the next.*set ds.packing_samples=false"
    ):
        refuse_leaks(scorer, scorer, DEVICE)


def test_models_are_asked_only_if_they_get_packed_rows():
    scorer = TokenScorer(both(LEAKING["convolution"])[0], chunk=8)

    refuse_leaks(scorer, scorer, DEVICE)


def test_a_critic_is_asked_at_its_backbone():
    """Its head is zero at first: its values say nothing."""
    model = both(MODELS["llama"], AutoModelForSequenceClassification)[1]
    torch.nn.init.zeros_(model.score.weight)
    scorer = ValueScorer(model, packs=True)
    layer = scorer.backbone.layers[0].self_attn
    layer.register_forward_hook(lambda module, inputs, output: (output[0].cumsum(dim=1), None))  # a state over the row

    with pytest.raises(TrainingError, match="from one sample of a packed row to the next"):
        refuse_leaks(scorer, scorer, DEVICE)


def test_model_that_drops_the_bounds_of_samples_is_refused():
    config = OPTConfig(
        vocab_size=64, hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=16
    )

    with pytest.raises(TrainingError, match="OPTAttention is not told where the samples of a packed row begin"):
        TokenScorer(AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_SDPA), chunk=8, packs=True)


def test_model_is_loaded_with_the_attention_for_packed_rows(tmp_path):
    AutoModelForCausalLM.from_config(MODELS["llama"]).save_pretrained(tmp_path)

    loaded = load_causal_lm(tb.config("ds.packing_samples=true"), str(tmp_path))
    loaded.save_pretrained(tmp_path / "exported")

    assert loaded.config._attn_implementation == PACKED_SDPA
    assert PACKED_SDPA not in (tmp_path / "exported" / "config.json").read_text()
