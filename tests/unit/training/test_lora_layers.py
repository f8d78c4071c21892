"""Adapters on small random models of Hugging Face, without DeepSpeed: where they go, how they begin, what they amount to."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rlhf_core.config import parse_supervised_config
from rlhf_core.config.trained import LoraConfig
from rlhf_core.data.tiny_vision_model import make_tiny_vision_model
from rlhf_core.errors import TrainingError
from rlhf_core.training.loading import load_causal_lm
from rlhf_core.training.lora import adapted_modules, add_adapters, model_weights
from rlhf_core.training.value_model import SequenceScorer
from rlhf_core.training.visual import visual_parameters

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
# [out, in] of a layer: q, k, v, o, gate, up, down
MATRICES = [(16, 16), (8, 16), (8, 16), (16, 16), (24, 16), (24, 16), (16, 24)]
IDS_BT = torch.tensor([[5, 9, 7, 3, 8], [3, 4, 2, 1, 1]])
RANK = 4


def causal_lm(tied=True, dtype=torch.float32, kind=(LlamaConfig, LlamaForCausalLM)):
    torch.manual_seed(0)
    return kind[1](kind[0](**SIZES, tie_word_embeddings=tied)).to(dtype)


def adapted(model, seed=1, **settings):
    add_adapters(model, LoraConfig(**{"rank": RANK, **settings}), seed)
    return model


def moved(model):
    """Its B as if it had learned something."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def wholes(model):
    return {weight.name: weight.whole([p.detach() for p in weight.parts]) for weight in model_weights(model)}


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_only_adapters_are_trained_and_the_model_says_what_it_said():
    model = causal_lm()
    before = model(IDS_BT).logits

    adapted(model)

    assert torch.equal(model(IDS_BT).logits, before)
    assert all(".lora_" in name for name in trained(model))
    sizes = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    assert sum(sizes) == 2 * sum(RANK * (out + into) for out, into in MATRICES)


def test_rank_0_changes_nothing():
    model = adapted(causal_lm(), rank=0)

    assert trained(model) == dict(model.named_parameters()).keys()
    assert wholes(model).keys() == dict(causal_lm().named_parameters()).keys()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [(LlamaConfig, LlamaForCausalLM), (Qwen2Config, Qwen2ForCausalLM)])
def test_merged_weights_are_a_plain_model_that_says_the_same(tied, kind):
    """Qwen2's projections have biases; tied weights come once."""
    model, plain = moved(adapted(causal_lm(tied, kind=kind), alpha=3)), causal_lm(tied, kind=kind)
    changed = (model(IDS_BT).logits - plain(IDS_BT).logits).abs().max()

    plain.load_state_dict(wholes(model), strict=not tied)

    assert wholes(model).keys() == dict(plain.named_parameters()).keys()
    assert changed > 0.01
    torch.testing.assert_close(plain(IDS_BT).logits, model(IDS_BT).logits, atol=1e-6, rtol=0)


def test_merging_rounds_once_and_leaves_the_model_as_it_is():
    """In bf16 the sum is rounded; what it is the sum of is not."""
    model = moved(adapted(causal_lm(dtype=torch.bfloat16)))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    first, second = wholes(model), wholes(model)

    layer = model.model.layers[0].mlp.down_proj
    a, b, w = (p.weight.double() for p in (layer.lora_A.default, layer.lora_B.default, layer.base_layer))
    exact = w + 16 / RANK * b @ a
    assert torch.equal(first["model.layers.0.mlp.down_proj.weight"], exact.to(torch.bfloat16))
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_shapes_and_types_are_those_of_the_plain_model():
    model = adapted(causal_lm(dtype=torch.bfloat16))

    described = [(weight.name, weight.dtype, weight.shape) for weight in model_weights(model)]

    assert described == [(name, p.dtype, tuple(p.shape)) for name, p in causal_lm().bfloat16().named_parameters()]


def test_adapters_begin_by_their_seed_whatever_was_drawn_before():
    first, again, other = (causal_lm() for _ in range(3))
    adapted(first)
    torch.manual_seed(99)
    adapted(again)
    adapted(other, seed=2)

    states = [
        {name: p for name, p in model.named_parameters() if ".lora_A." in name} for model in (first, again, other)
    ]

    assert all(torch.equal(p, states[1][name]) and p.any() for name, p in states[0].items())
    assert not any(torch.equal(p, states[2][name]) for name, p in states[0].items())


@pytest.mark.parametrize(
    ("wanted", "kinds"),
    [
        (["all-linear"], 7),
        (["q_proj", "v_proj"], 2),
        (["mlp.up_proj"], 1),
        (["q_proj", "all-linear"], 7),
    ],
)
def test_layers_are_chosen_by_the_ends_of_their_names(wanted, kinds):
    names = adapted_modules(causal_lm(tied=False), wanted)

    assert len(names) == 2 * kinds
    assert "lm_head" not in names


@pytest.mark.parametrize("name", ["c_attn", "proj", "lm_head", "embed_tokens", "q_proj.weight"])
def test_a_name_of_no_layer_is_refused_with_those_that_there_are(name):
    with pytest.raises(
        TrainingError, match=f"target_modules: '{name}' is no linear layer .* use 'all-linear', or of down_proj, g"
    ):
        adapted(causal_lm(tied=False), target_modules=["q_proj", name])


def test_a_vision_tower_has_none(tmp_path):
    """Its layers have the same names; it is frozen with all else."""
    model = AutoModelForImageTextToText.from_pretrained(make_tiny_vision_model(tmp_path / "vlm"))
    eyes = visual_parameters(model).keys()
    assert any(name.endswith("q_proj.weight") for name in eyes)

    adapted(model, target_modules=["q_proj"])

    assert trained(model)
    assert all("text_model" in name and ".lora_" in name for name in trained(model))
    with pytest.raises(TrainingError, match="'fc1' is no linear layer in the language model of Idefics3"):
        adapted_modules(model, ["fc1"])


def test_a_new_head_is_trained_too_and_sent_whole():
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1))
    names = [name for name, _ in model.named_parameters()]
    scorer = SequenceScorer(model)

    add_adapters(model, LoraConfig(rank=RANK), 1, trained_too=scorer.head.parameters())
    moved(model)

    assert {name for name in trained(model) if ".lora_" not in name} == {"score.weight"}
    assert list(wholes(model)) == names
    scorer(IDS_BT, torch.tensor([5, 3])).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters() if p.requires_grad)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_four_bits_need_a_gpu(tmp_path):
    causal_lm().save_pretrained(tmp_path)
    config = parse_supervised_config(
        {"model": {"model_name_or_path": "m"}, "data": {"dataset": "d.jsonl"}},
        ["ds.load_in_4bit=true", "ds.lora.rank=8"],
    )

    with pytest.raises(TrainingError, match="ds.load_in_4bit needs a CUDA GPU, and this process has none"):
        load_causal_lm(config, str(tmp_path))
