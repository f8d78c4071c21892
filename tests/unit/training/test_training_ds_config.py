from __future__ import annotations

import pytest
import training_batches as tb
from torch import nn

from rlhf_core.training.ds_config import frozen_config, parameter_groups, policy_config


def test_optimizer_follows_the_configuration():
    config = tb.config("actor.adam.lr=3e-4", "actor.adam.weight_decay=0.1", "actor.max_norm=0.5")

    made = policy_config(config, world_size=2)

    assert made["optimizer"]["params"] == {
        "lr": 3e-4,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.1,
        "torch_adam": True,
        "fused": True,
    }
    assert made["gradient_clipping"] == 0.5


def test_deepspeed_never_divides_by_accumulation_steps():
    made = policy_config(tb.config("train.micro_batch_size=4"), world_size=2)

    assert (made["train_batch_size"], made["gradient_accumulation_steps"]) == (2, 1)


@pytest.mark.parametrize(("dtype", "enabled"), [("fp32", []), ("bf16", ["bf16"]), ("fp16", ["fp16"])])
def test_type_of_the_parameters(dtype, enabled):
    made = policy_config(tb.config(f"ds.param_dtype={dtype}"), world_size=1)

    assert [name for name in ("bf16", "fp16") if made[name]["enabled"]] == enabled


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_summed_in_fp32(stage):
    made = policy_config(tb.config(f"ds.zero_stage={stage}", "ds.param_dtype=bf16"), world_size=1)

    assert made["zero_optimization"]["stage"] == stage
    assert (made["data_types"]["grad_accum_dtype"], made["communication_data_type"]) == ("fp32", "fp32")


def test_frozen_model_has_no_optimizer():
    assert "optimizer" not in frozen_config(tb.config("ds.zero_stage=3"), world_size=1)


def test_biases_norms_and_frozen_parameters_are_not_decayed():
    module = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1, bias=False))
    module[2].weight.requires_grad_(False)

    decayed, plain = parameter_groups(module, weight_decay=0.1)

    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert [tuple(p.shape) for p in decayed["params"]] == [(3, 2)]
    assert [tuple(p.shape) for p in plain["params"]] == [(3,), (3,), (3,)]
