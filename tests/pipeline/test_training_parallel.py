"""One model over two ranks: divided rows, optimizer offload, hpZ, and experts that ranks use differently, against one rank.

Ranks of its own: hpZ's groups stay for the life of a process, and every later model in it would use them.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import training_cases as cases

from rlhf_core.errors import TrainingError

pytestmark = pytest.mark.pipeline

DIVIDED = ("ds.packing_samples=true", "ds.sequence_parallel_size=2")


@pytest.fixture(scope="module")
def ranks():
    pool = cases.RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def model(tiny_model):
    return str(tiny_model)


def rows_with_a_long_prompt():
    """Packed alone, the last row leaves the first rank without an action; 21 tokens of the others have no equal parts."""
    return [*cases.experiences(lengths=[7, 2, 3]), cases.experience(3, 2, prompt=40)]


# --- sequence parallelism -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_divided_rows_give_the_gradient_of_whole_ones(ranks, model, stage):
    rows = rows_with_a_long_prompt()
    settings = [f"ds.zero_stage={stage}", *DIVIDED, "train.dynamic_batch_enable=true", "train.max_tokens_per_gpu=4096"]
    settings += (
        [] if stage == 2 else ["train.dynamic_batch_enable=false", "train.micro_batch_size=1", "ds.logprob_chunk=1"]
    )

    both = ranks.run(cases.gradient, model, rows, [*settings, f"actor.gradient_checkpointing_enable={stage == 3}"])

    expected = cases.naive_gradient(model, rows)
    assert all(cases.largest_difference(gradient, expected) < 1e-6 for gradient in both)


def test_logprobs_of_divided_rows_are_told_once(ranks, one_rank, model):
    rows = [*rows_with_a_long_prompt(), cases.experience(4, 0, prompt=9)]

    first, second = ranks.run(cases.logprobs, model, rows, [*DIVIDED, "rollout.micro_batch_size=2"])

    [whole] = one_rank.run(cases.logprobs, model, rows)
    assert sorted(first) == [0, 1, 2, 3, 4]
    assert second == {}
    for index, logprobs_T in whole.items():
        np.testing.assert_allclose(first[index], logprobs_T, atol=1e-5)


def test_loss_curve_of_divided_rows_is_that_of_one_rank(ranks, one_rank, model):
    batches = [cases.experiences(lengths=[7, 2, 3, 5], seed=seed) for seed in range(3)]
    [(alone, _)] = one_rank.run(cases.updates, model, batches)

    (together, digests), (others, other_digests) = ranks.run(
        cases.updates, model, batches, ["ds.zero_stage=3", *DIVIDED]
    )

    assert digests == other_digests
    for ours, theirs, reference in zip(together, others, alone, strict=True):
        assert ours.num_tokens == theirs.num_tokens == reference.num_tokens == 17
        assert ours.policy_loss == theirs.policy_loss == pytest.approx(reference.policy_loss, abs=1e-6)
        assert ours.grad_norm == theirs.grad_norm == pytest.approx(reference.grad_norm, rel=1e-4)


def other_layout(rank, model, batches, folder):
    """Divided rows, saved; then by a new trainer with whole rows: digests at the seam, and the report after it."""
    universal = "ds.use_universal_ckpt=true"
    first = cases.make_trainer(rank, model, [*DIVIDED, universal])
    first.update(batches[0], 0)
    first.save(folder)
    second = cases.make_trainer(rank, model, ["ds.zero_stage=3", universal])
    second.load(folder)
    return first.weight_digest(), second.weight_digest(), second.update(batches[1], 1), first.update(batches[1], 1)


def test_whole_rows_go_on_from_a_checkpoint_of_divided_ones(ranks, model, tmp_path):
    batches = [cases.experiences(seed=seed) for seed in range(2)]

    for saved, restored, whole, divided in ranks.run(other_layout, model, batches, tmp_path):
        assert saved == restored
        assert whole.policy_loss == pytest.approx(divided.policy_loss, abs=1e-5)


def make_model(kind):
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        MistralConfig,
        MistralForCausalLM,
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
    )

    torch.manual_seed(0)
    if kind == "experts":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        return Qwen2MoeForCausalLM(Qwen2MoeConfig(**cases.SIZES, **experts, shared_expert_intermediate_size=8))
    if kind == "window":
        return MistralForCausalLM(MistralConfig(**cases.SIZES, sliding_window=4))
    if kind in ("values", "scores"):
        return LlamaForSequenceClassification(LlamaConfig(**cases.SIZES, num_labels=1))
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 12} if kind == "three heads" else {}
    return LlamaForCausalLM(LlamaConfig(**{**cases.SIZES, **heads}))


def packing_scorer(kind, model):
    from rlhf_core.training.model import TokenScorer
    from rlhf_core.training.packed_attention import PACKED_SDPA
    from rlhf_core.training.value_model import SequenceScorer, ValueScorer

    model.set_attn_implementation(PACKED_SDPA)
    if kind in ("values", "scores"):
        return {"values": ValueScorer, "scores": SequenceScorer}[kind](model, packs=True)
    return TokenScorer(model, 1, balance_experts=kind == "experts", packs=True)


def loss_of(kind, scorer):
    if kind == "values":
        return (scorer(cases.IDS_BT, cases.ACTIONS_BT) * torch.arange(9)).sum()
    if kind == "scores":
        return scorer(cases.IDS_BT, torch.tensor([9, 2, 5])).square().sum()
    scores = scorer(cases.IDS_BT, cases.ACTIONS_BT, torch.tensor([0.7, 1.0, 1.3]), want_entropy=True)
    loss = (scores.logprobs_BT + 0.1 * scores.entropy_BT).sum()
    return loss if scores.aux_loss is None else loss + scores.aux_loss


def loss_and_gradient(rank, kind, divided):
    """Of this rank's backward pass: with divided rows the gradients of all ranks add up to the whole."""
    from dataclasses import replace

    from torch import distributed

    from rlhf_core.training.sequence_parallel import sequence_split

    scorer = packing_scorer(kind, make_model(kind)).train()
    if divided:
        scorer.split = sequence_split(replace(rank, sequence_parallel_size=2))
    loss = loss_of(kind, scorer)
    loss.backward()
    gradient = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in scorer.named_parameters()}
    for part in gradient.values():
        if divided:
            distributed.all_reduce(part)
    return loss.item(), {name: part.numpy() for name, part in gradient.items()}


@pytest.mark.parametrize("kind", ["values", "scores", "experts", "window"])
def test_every_scorer_divides_its_rows(ranks, one_rank, kind):
    [(loss, gradient)] = one_rank.run(loss_and_gradient, kind, False)

    for divided_loss, divided in ranks.run(loss_and_gradient, kind, True):
        assert divided_loss == pytest.approx(loss, rel=1e-6)
        assert cases.largest_difference(divided, gradient) < 1e-5


def refusal(rank, kind):
    from dataclasses import replace

    from rlhf_core.training.packing import refuse_leaks, refuse_splits
    from rlhf_core.training.sequence_parallel import sequence_split

    model = make_model(kind)
    if kind == "counts positions":  # rotary ones are relative: packed rows do not show it
        rotary = model.model.rotary_emb
        rotary.register_forward_pre_hook(
            lambda module, args, kwargs: ((args[0], torch.arange(args[0].shape[1])[None]), {}), with_kwargs=True
        )
    scorer = packing_scorer(kind, model)
    scorer.split = sequence_split(replace(rank, sequence_parallel_size=2))
    refuse_leaks(scorer, scorer, rank.torch_device)
    try:
        refuse_splits(scorer, scorer, rank.torch_device)
    except TrainingError as error:
        return str(error)
    raise AssertionError("it is not refused")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("three heads", "ds.sequence_parallel_size=2 does not divide the 3 heads of LlamaAttention: use a divisor"),
        ("counts positions", "LlamaModel answers otherwise when a row is divided over ranks"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_by_name(ranks, kind, said):
    assert all(said in message for message in ranks.run(refusal, kind))


# --- optimizer offload, hpZ -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "more"),
    [(1, "ds.adam_offload=true"), (2, "ds.adam_offload=true"), (3, "ds.adam_offload=true"), (3, "ds.zpg=2")],
)
def test_updates_are_the_same_wherever_their_numbers_lie(ranks, model, tmp_path, stage, more):
    """And they go on from a checkpoint. The losses of the last two updates tell what those before did to the weights."""
    batches = [cases.experiences(seed=seed) for seed in range(3)]
    settings = [f"ds.zero_stage={stage}", "actor.gradient_checkpointing_enable=true"]
    [(plain, _), _] = ranks.run(cases.updates, model, batches, settings)

    moved = [*settings, more, f"ds.use_universal_ckpt={stage == 3}"]
    [(reports, _, counts), _] = ranks.run(cases.continued, model, batches, moved, tmp_path)

    assert counts == (3, 3)
    assert [report.policy_loss for report in reports] == pytest.approx(
        [report.policy_loss for report in plain[1:]], abs=1e-6
    )


# --- mixtures of experts ----------------------------------------------------------------------------------------------


class ExpertList(torch.nn.Module):
    """Of two experts, the first takes tokens below 7, the second the others: a rank may need only one of them."""

    def __init__(self, layer):
        super().__init__()
        self.experts = torch.nn.ModuleList([layer, type(layer)(layer.config)])
        self.seen = None

    def forward(self, hidden_BTH):
        out_BTH = torch.zeros_like(hidden_BTH)
        for number, expert in enumerate(self.experts):
            chosen_BT = (self.seen >= 7).long() == number
            if chosen_BT.any():
                out_BTH = out_BTH.masked_scatter(chosen_BT.unsqueeze(2), expert(hidden_BTH[chosen_BT]))
        return out_BTH


def experts_in_lists():
    model = make_model("experts in lists")
    for layer in model.model.layers:
        layer.mlp = ExpertList(layer.mlp)
        model.model.embed_tokens.register_forward_pre_hook(
            lambda module, args, block=layer.mlp: setattr(block, "seen", args[0])
        )
    return model


def sharded_experts(rank, ids_BT):
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    from rlhf_core.training.ds_config import trained_config
    from rlhf_core.training.model import TokenScorer
    from rlhf_core.training.moe import gather_experts_together

    settings = cases.config("ds.zero_stage=3", "actor.num_gpus_per_node=2")
    model = experts_in_lists()
    scorer = TokenScorer(model, 8)
    gather_experts_together(scorer)
    body = trained_config(settings.ds, settings.actor)
    body["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    engine, *_ = deepspeed.initialize(model=scorer, optimizer=torch.optim.AdamW(scorer.parameters()), config=body)
    engine.train()
    mine_BT = ids_BT[rank.rank : rank.rank + 1]
    actions_BT = (torch.arange(mine_BT.shape[1]) > 0)[None]
    engine.backward(engine(mine_BT, actions_BT, torch.ones(1), False).logprobs_BT.sum() * 2)  # it takes the mean
    return {name: safe_get_full_grad(p).numpy() for name, p in model.named_parameters()}


def test_ranks_whose_tokens_meet_different_experts_do_not_wait_for_each_other(ranks):
    """Without a leaf the first rank gathers expert 0, the second expert 1: other sizes, or a wait for ever."""
    ids_BT = torch.tensor([[1, 2, 3, 4, 5], [8, 9, 10, 11, 12]])
    model = experts_in_lists()
    logp_BTV = model(input_ids=ids_BT).logits[:, :-1].log_softmax(2)
    logp_BTV.gather(2, ids_BT[:, 1:].unsqueeze(2)).sum().backward()
    expected = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}

    for gradient in ranks.run(sharded_experts, ids_BT):
        assert cases.largest_difference(gradient, expected) < 1e-5
