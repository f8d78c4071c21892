from __future__ import annotations

import pytest
import training_batches as tb

from rlhf_core.training.ds_config import frozen_config, trained_config


def made_of(*overrides):
    config = tb.config(*overrides)
    return trained_config(config.ds, config.actor)


def test_gradients_are_clipped_to_the_norm_of_the_model():
    assert made_of("actor.max_norm=0.5")["gradient_clipping"] == 0.5


def test_what_muon_makes_of_the_gradients_is_not_clipped_and_needs_them_whole():
    made = made_of("actor.optim=muon")

    assert (made["gradient_clipping"], made["zero_optimization"]["reduce_scatter"]) == (0.0, False)


def test_deepspeed_never_divides_by_accumulation_steps():
    made = made_of("train.micro_batch_size=4", "actor.num_gpus_per_node=2")

    assert (made["train_batch_size"], made["gradient_accumulation_steps"]) == (2, 1)


@pytest.mark.parametrize(("dtype", "enabled"), [("fp32", []), ("bf16", ["bf16"]), ("fp16", ["fp16"])])
def test_type_of_the_parameters(dtype, enabled):
    made = made_of(f"ds.param_dtype={dtype}")

    assert [name for name in ("bf16", "fp16") if made[name]["enabled"]] == enabled


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_summed_in_fp32(stage):
    made = made_of(f"ds.zero_stage={stage}", "ds.param_dtype=bf16")

    assert made["zero_optimization"]["stage"] == stage
    assert (made["data_types"]["grad_accum_dtype"], made["communication_data_type"]) == ("fp32", "fp32")


def test_frozen_model_is_not_clipped():
    assert "gradient_clipping" not in frozen_config(tb.config("ds.zero_stage=3").ds, world_size=1)
