"""Bytes of a process against sums by hand.

::

    model       P = 1000 parameters, 2 layers, h = 8, 2 heads and 1 key-value head of 4, MLP of 16, vocabulary of 100
    training    2 ranks, bf16, micro-batches of 10 tokens
"""

from dataclasses import replace

import pytest

from rlhf_core.data.tiny_vision_model import make_tiny_vision_model
from rlhf_core.planning import memory
from rlhf_core.planning.memory import GIB, Serving, Training, optimizer_bytes
from rlhf_core.planning.shape import ModelShape, shape_of

SHAPE = ModelShape(
    name="small",
    parameters=1000,
    active=1000,
    embedding=0,
    layers=2,
    hidden=8,
    heads=2,
    kv_heads=1,
    head_dim=4,
    intermediate=16,
    vocabulary=100,
    largest=800,
    linear=((8, 8), (8, 16)),
    matrices=600,
)
HOW = Training(ranks=2, zero_stage=0, dtype="bf16", tokens=10, longest=5, chunk=1024)
BUCKET = 4 * 50_000_000


def parts(need):
    return {part.name: part.bytes for part in need.parts}


@pytest.mark.parametrize(
    ("stage", "parameters", "gradients", "optimizer", "buffers"),
    [
        (0, 2000, 4000, 12_000, 0),
        (1, 2000, 4000, 6_000, BUCKET),
        (2, 2000, 2000, 6_000, BUCKET),
        (3, 1000, 2000, 6_000, BUCKET + 2000),  # and what is gathered for a pass
    ],
)
def test_states_by_zero_stage(stage, parameters, gradients, optimizer, buffers):
    found = parts(memory.learning_rank("policy", SHAPE, replace(HOW, zero_stage=stage), "cpu"))

    assert (found["parameters"], found["gradients"], found["optimizer"]) == (parameters, gradients, optimizer)
    assert found["buffers"] == buffers


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 12_000),  # fp32 masters and two moments
        ({"dtype": "fp32"}, 8_000),  # without ZeRO the parameters are the masters
        ({"dtype": "fp32", "zero_stage": 1}, 12_000),
        ({"muon": True}, 12_000 - 4 * 600),  # matrices have one moment
        ({"lora_rank": 4}, 12 * 4 * (16 + 24)),  # r (in + out) of each layer
    ],
)
def test_optimizer(changes, expected):
    assert optimizer_bytes(SHAPE, replace(HOW, **changes)) == expected


def test_activations_of_a_layer():
    """A token: 2 bytes × (4·8 hidden + 2·(2 + 2·1)·4 + 2·4 attention + 4·16 MLP) + 2 norms × 8 × 4 bytes = 336."""
    layer = 10 * 336
    ends = 2 * 4 * 10 * 8

    whole = memory.activation_bytes(SHAPE, HOW)
    checkpointed = memory.activation_bytes(SHAPE, replace(HOW, checkpointing=True))
    divided = memory.activation_bytes(SHAPE, replace(HOW, sequence_parallel=2))
    eager = memory.activation_bytes(SHAPE, replace(HOW, eager_attention=True))

    assert whole == 2 * layer + ends
    assert checkpointed == 2 * (2 * 10 * 8) + layer + ends
    assert divided == whole / 2
    assert eager - whole == 2 * 10 * (2 + 4) * 2 * 5  # the scores of every head, over 5 tokens, in bf16 and fp32


@pytest.mark.parametrize(
    ("device", "tokens", "vocabulary", "elements"),
    [
        ("cpu", 10, 100, 10 * 100),  # all there are
        ("cpu", 1000, 50_000, 1 << 21),  # 8 MiB
        ("gpu", 1000, 50_000, 1 << 25),
        ("cpu", 100_000, 50_000, 128 * 100_000),  # at least 128 columns
    ],
)
def test_tiles_of_logits(device, tokens, vocabulary, elements):
    shape, how = replace(SHAPE, vocabulary=vocabulary), replace(HOW, tokens=tokens)

    assert memory.logit_bytes(shape, how, device) == 3 * 4 * elements


def test_offload_moves_the_optimizer_to_the_host():
    need = memory.learning_rank("policy", SHAPE, replace(HOW, zero_stage=2, adam_offload=True), "gpu")

    assert "optimizer" not in parts(need)
    assert {part.name: part.bytes for part in need.host}["optimizer and gradients"] == 6_000 + 2_000


def test_tensor_parallel_ranks_hold_a_part_of_the_model():
    """4 ranks, 2 by 2: half of the 600 numbers inside layers, all of the others, and ZeRO over 2."""
    how = replace(HOW, ranks=4, zero_stage=1, tensor_parallel=2)
    found = parts(memory.learning_rank("policy", SHAPE, how, "cpu"))

    assert (found["parameters"], found["gradients"], found["optimizer"]) == pytest.approx((1400, 2800, 4200))
    assert parts(memory.scoring_rank("reference", SHAPE, how, "cpu"))["parameters"] == pytest.approx(1400)


def test_lora_trains_only_adapters_above_a_model_in_4_bits():
    found = parts(memory.learning_rank("policy", SHAPE, replace(HOW, lora_rank=4, in_4bit=True), "gpu"))

    assert found["parameters"] == 1000 * (0.5 + 1 / 64) + 2 * 160
    assert (found["gradients"], found["optimizer"]) == (4 * 160, 12 * 160)


def test_who_sleeps_leaves_the_device():
    awake = memory.learning_rank("policy", SHAPE, replace(HOW, zero_stage=1), "gpu")
    asleep = memory.learning_rank("policy", SHAPE, replace(HOW, zero_stage=1), "gpu", sleeps=True)

    held = 2000 + 4000 + 6000 + BUCKET
    assert awake.resting - asleep.resting == held
    assert (awake.resting_host, asleep.resting_host) == (0, held)


def test_an_engine_on_a_gpu_takes_its_share_and_keeps_what_is_left_for_the_cache():
    """KV of a token: 2 (K, V) × 2 layers × 1 head × 4 × 2 bytes = 32."""
    how = Serving("bf16", 1, 4, 64, utilization=0.5, cpu_kv_gib=1, enforce_eager=True)
    found = memory.engine(SHAPE, how, "gpu", 10 * GIB)

    assert found.kv_per_token == 32
    assert found.need.bytes == 5 * GIB
    assert found.kv_bytes == 5 * GIB - 2000 - parts(found.need)["overhead"]
    assert found.kv_tokens == int(found.kv_bytes // 32)


def test_an_engine_on_cpu():
    how = Serving("fp32", 1, 4, 64, utilization=0.9, cpu_kv_gib=0.5)
    found = parts(memory.engine(SHAPE, how, "cpu", 0).need)

    assert (found["weights"], found["KV cache"]) == (4000, 0.5 * GIB)


def test_the_shape_of_the_tiny_model(tiny_model):
    """Read from config.json: the weights need not be there."""
    shape = shape_of(str(tiny_model))

    assert (shape.parameters, shape.layers, shape.vocabulary) == (369_280, 2, 320)
    assert shape.active == shape.parameters


def test_shapes_need_no_weights(tmp_path):
    from transformers import LlamaConfig, Qwen3MoeConfig

    LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, tie_word_embeddings=False,
    ).save_pretrained(tmp_path / "llama-8b")  # fmt: skip
    Qwen3MoeConfig(
        vocab_size=151_936, hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, tie_word_embeddings=False,
    ).save_pretrained(tmp_path / "qwen3-30b-a3b")  # fmt: skip

    llama, qwen = shape_of(str(tmp_path / "llama-8b")), shape_of(str(tmp_path / "qwen3-30b-a3b"))
    critic = shape_of(str(tmp_path / "llama-8b"), num_labels=1)

    assert llama.parameters == 8_030_261_248  # as published
    assert llama.kv_elements * 2 == 128 * 1024  # bytes of a token in bf16
    assert critic.parameters == llama.parameters - 128_256 * 4096 + 4096  # a head of one number for the output layer
    assert round(qwen.parameters / 1e9, 1) == 30.5
    assert round(qwen.active / 1e9, 1) == 3.4


def test_a_critic_that_sees_has_the_vision_tower(tmp_path):
    policy = str(make_tiny_vision_model(tmp_path / "vlm"))

    speaker, critic = shape_of(policy), shape_of(policy, num_labels=1)

    assert critic.parameters == speaker.parameters - speaker.vocabulary * speaker.hidden + speaker.hidden
