"""Which layers are divided over ranks, and which models are refused: without ranks, DeepSpeed or weights of any size."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlhf_core.errors import TrainingError
from rlhf_core.training.ranks import RankInfo
from rlhf_core.training.tensor_parallel import Cut, divide_layers, tensor_parallel_plan, total_norm

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "pad_token_id": None,
}


def llama(**changes):
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes}))


def without_head_dim(**changes):
    return {name: size for name, size in {**SIZES, **changes}.items() if name != "head_dim"}


@pytest.mark.parametrize("tied", [False, True])
def test_a_plan_names_the_layers_of_every_block(tied):
    """And no embeddings, which Transformers would divide where they are the output layer too."""
    plan = tensor_parallel_plan(llama(tie_word_embeddings=tied), 2)

    assert len(plan) == 2 * 7
    assert plan["layers.1.self_attn.k_proj"] == plan["layers.0.mlp.up_proj"] == "colwise"
    assert plan["layers.1.self_attn.o_proj"] == plan["layers.0.mlp.down_proj"] == "rowwise"


def test_norms_of_heads_are_whole_and_their_gradients_are_summed():
    plan = tensor_parallel_plan(Qwen3ForCausalLM(Qwen3Config(**SIZES)), 2)

    assert plan["layers.0.self_attn.q_norm"] == plan["layers.1.self_attn.k_norm"] == "replicated_with_grad_allreduce"


def scaled_heads():
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.temperature = torch.nn.Parameter(torch.ones(4))
    return model


def experts():
    shape = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**without_head_dim(), **shape, shared_expert_intermediate_size=8))


@pytest.mark.parametrize(
    ("make", "size", "said"),
    [
        (llama, 3, "ds.tensor_parallel_size=3 does not divide the 4 heads of LlamaForCausalLM: use a divisor of them"),
        (
            llama,
            4,
            "ds.tensor_parallel_size=4 does not divide the 2 key-value heads of LlamaForCausalLM: use a divisor",
        ),
        (
            lambda: llama(intermediate_size=25),
            2,
            "does not divide the 25 rows of layers.0.mlp.gate_proj of LlamaForCausalLM: use a divisor",
        ),
        (
            lambda: GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=4)),
            2,
            "Transformers has no plan for dividing the layers of GPT2LMHeadModel: ds.tensor_parallel_size=2, set it to 1",
        ),
        (
            lambda: Phi3ForCausalLM(Phi3Config(**without_head_dim())),
            2,
            "Phi3ForCausalLM: layers.0.self_attn.o_proj (Linear, 'rowwise_split_input') is a layer that is not divided here",
        ),
        (lambda: Olmo2ForCausalLM(Olmo2Config(**without_head_dim())), 2, "is a layer that is not divided here"),
        (
            scaled_heads,
            2,
            "layers.0.self_attn.temperature stands between divided layers, and Transformers' plan says nothing of it",
        ),
        (experts, 2, "only (its experts would stay whole on every rank): ds.tensor_parallel_size=2, set it to 1"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_with_the_reason(make, size, said):
    with pytest.raises(TrainingError) as caught:
        tensor_parallel_plan(make(), size)

    assert said in str(caught.value)


def test_without_the_key_nothing_is_divided():
    model = llama()

    assert divide_layers(model, RankInfo(0, 1, 0, "127.0.0.1", 0, "cpu")) is None
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear


@pytest.mark.parametrize(("dim", "index", "expected"), [(0, 1, [[4, 5, 6, 7]]), (1, 0, [[0, 1], [4, 5]])])
def test_a_part_is_one_of_equal_ones(dim, index, expected):
    whole = torch.arange(8).view(2, 4)

    assert Cut((2, 4), dim, 2, index, None).part(whole).tolist() == expected


def test_the_norm_of_a_whole_model_is_that_of_its_gradient():
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])

    assert total_norm(parameters) == 5.0
