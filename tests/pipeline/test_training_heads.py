"""Output layers, routers and value heads on two real ranks that have different numbers of actions, at every ZeRO stage.

Rank 0 has 2 action tokens, rank 1 has 9; tiles are one column wide. The gradient is compared with the mean of the ranks' losses
by Hugging Face's own forward pass, with all logits.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import training_cases as cases

pytestmark = pytest.mark.pipeline

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": None,
}
IDS_BT = [torch.tensor([[5, 6, 7, 8], [3, 4, 0, 0]]), torch.arange(30).reshape(3, 10) % 7]
ACTIONS_BT = [
    torch.tensor([[0, 0, 0, 1], [0, 1, 0, 0]], dtype=torch.bool),
    (torch.arange(10) % 3 == 1).logical_or(torch.arange(10) == 9).expand(3, 10).contiguous(),
]
ACTIONS_BT[1][:, [1, 4]] = torch.tensor([[True, True], [False, True], [True, False]])
MIXTURES = ("experts", "experts and a filler")
TEMPERATURE_B = [torch.tensor([0.7, 1.0]), torch.tensor([1.0, 0.5, 1.3])]


@pytest.fixture(scope="module")
def ranks(two_ranks):
    return two_ranks


def make_model(kind, **changes):
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        PhiConfig,
        PhiForCausalLM,
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
    )

    torch.manual_seed(0)
    if kind in MIXTURES:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        sizes = {**SIZES, **experts, "shared_expert_intermediate_size": 8, **changes}
        return Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes))
    if kind == "bias":
        return PhiForCausalLM(PhiConfig(**SIZES))
    if kind in ("values", "scores"):
        return LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1))
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=kind == "tied"))


def scorer_of(kind, model):
    from rlhf_core.training.model import TokenScorer
    from rlhf_core.training.value_model import SequenceScorer, ValueScorer

    if kind == "values":
        return ValueScorer(model)
    if kind == "scores":
        return SequenceScorer(model)
    return TokenScorer(model, 1, balance_experts=kind in MIXTURES)


def loss_of(kind, scorer, rank):
    from rlhf_core.training.objective import filler_loss

    ids_BT, actions_BT = IDS_BT[rank], ACTIONS_BT[rank]
    if kind == "values":
        return (scorer(ids_BT, actions_BT) * torch.arange(ids_BT.shape[1])).sum()
    if kind == "scores":
        return scorer(ids_BT, actions_BT.sum(1) + 1).square().sum()
    scores = scorer(ids_BT, actions_BT, TEMPERATURE_B[rank], want_entropy=True)
    if kind == "experts and a filler" and rank == 1:
        return filler_loss(scores).loss
    loss = (scores.logprobs_BT + 0.1 * scores.entropy_BT).sum()
    return loss if scores.aux_loss is None else loss + scores.aux_loss


def naive_loss(kind, model, rank):
    ids_BT, actions_BT = IDS_BT[rank], ACTIONS_BT[rank]
    if kind in ("values", "scores"):
        values_BT = model.score(model.model(input_ids=ids_BT).last_hidden_state).squeeze(2).float()
        if kind == "scores":
            return values_BT[torch.arange(len(ids_BT)), actions_BT.sum(1)].square().sum()
        return (values_BT[:, :-1] * actions_BT[:, 1:] * torch.arange(1, ids_BT.shape[1])).sum()
    real_BT = actions_BT.flip(1).cumsum(1).flip(1) > 0
    wanted = {"output_router_logits": True} if kind in MIXTURES else {}
    output = model(input_ids=ids_BT, attention_mask=real_BT.long(), **wanted)
    logits_BTV = output.logits[:, :-1].float() / TEMPERATURE_B[rank][:, None, None]
    p = torch.distributions.Categorical(logits=logits_BTV)
    loss = ((p.log_prob(ids_BT[:, 1:]) + 0.1 * p.entropy()) * actions_BT[:, 1:]).sum()
    return loss + output.aux_loss if kind in MIXTURES else loss


def sharded_gradient(rank, kind, stage, dtype, checkpointing):
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    from rlhf_core.training.ds_config import trained_config

    settings = cases.config(f"ds.zero_stage={stage}", f"ds.param_dtype={dtype}", "actor.num_gpus_per_node=2")
    model = make_model(kind)
    if dtype == "bf16":
        model = model.bfloat16()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    scorer = scorer_of(kind, model)
    body = trained_config(settings.ds, settings.actor)
    body["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # or small parameters are never sharded
    engine, *_ = deepspeed.initialize(model=scorer, optimizer=torch.optim.AdamW(scorer.parameters()), config=body)
    engine.train()
    loss = loss_of(kind, engine, rank.rank)
    assert stage < 3 or all(
        parameter.numel() == 0 for parameter in scorer.head.parameters()
    )  # gathered anew for backward
    engine.backward(loss)
    return {name: safe_get_full_grad(p).detach().float().numpy() for name, p in model.named_parameters()}


def naive_gradient(kind, dtype):
    model = make_model(kind)
    if dtype == "bf16":
        model = model.bfloat16()
    ranks = [0] if kind == "experts and a filler" else [0, 1]
    (sum(naive_loss(kind, model, rank) for rank in ranks) / 2).backward()
    return {name: parameter.grad.float().numpy() for name, parameter in model.named_parameters()}


KINDS = ["tied", "untied", "bias", *MIXTURES, "values", "scores"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stage", "checkpointing"), [*((stage, False) for stage in range(4)), (2, True), (3, True)])
def test_gradient_is_that_of_a_naive_forward_pass(ranks, kind, stage, checkpointing):
    expected = naive_gradient(kind, "fp32")

    both = ranks.run(sharded_gradient, kind, stage, "fp32", checkpointing)

    assert all(cases.largest_difference(gradient, expected) < 2e-5 for gradient in both)


@pytest.mark.parametrize("kind", ["tied", "untied", "experts", "values"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_gradient_is_that_of_a_naive_forward_pass(ranks, kind, stage):
    expected = naive_gradient(kind, "bf16")
    largest = max(abs(gradient).max() for gradient in expected.values())

    both = ranks.run(sharded_gradient, kind, stage, "bf16", False)

    assert all(cases.largest_difference(gradient, expected) < 0.03 * largest for gradient in both)


def refusal(rank, model, overrides):
    from rlhf_core.errors import TrainingError

    try:
        cases.make_trainer(rank, model, overrides)
    except TrainingError as error:
        return str(error)


def test_updates_balance_the_experts(ranks, tmp_path):
    """Without advantages, the balancing loss is all there is to learn."""
    make_model("experts", vocab_size=256).save_pretrained(tmp_path)
    rows = [replace(row, advantages=0 * row.advantages) for row in cases.experiences([3, 5, 4, 2, 6, 1, 2, 3])]
    overrides = ["ds.zero_stage=2", "train.micro_batch_size=2", "actor.adam.lr=1e-2"]

    balanced = ranks.run(cases.updates, str(tmp_path), [rows] * 8, [*overrides, "actor.aux_loss_coef=0.5"])
    [(reports, _), _] = ranks.run(cases.updates, str(tmp_path), [rows], overrides)

    losses = [[report.aux_loss for report in reports] for reports, _ in balanced]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0] - 0.01
    assert reports[0].aux_loss is None


def test_model_without_experts_is_refused_as_it_is_loaded(ranks, tiny_model):
    both = ranks.run(refusal, str(tiny_model), ["actor.aux_loss_coef=0.5"])

    assert all("LlamaForCausalLM has no balancing loss" in message for message in both)
