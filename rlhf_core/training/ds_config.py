"""From our configuration to DeepSpeed's.

DeepSpeed's own scaling is switched off where it can be, and undone where it cannot: accumulation steps are 1 here (the
trainer says which backward is the last), and the mean that DeepSpeed takes over ranks is undone by ``PolicyTrainer``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from rlhf_core.config import Config

BUCKET_ELEMENTS = 50_000_000  # per collective; the buffer of this size is allocated in any case


def policy_config(config: Config, world_size: int) -> dict[str, Any]:
    """DeepSpeed's configuration of a model that is trained."""
    adam = config.actor.adam
    return {
        **_common(config, world_size),
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": adam.lr,
                "betas": list(adam.betas),
                "eps": adam.eps,
                "weight_decay": adam.weight_decay,
                "torch_adam": True,  # DeepSpeed's own compiles an op at first use
                "fused": True,
            },
        },
        "gradient_clipping": config.actor.max_norm,
        **_gradient_types(config),
    }


def frozen_config(config: Config, world_size: int) -> dict[str, Any]:
    """DeepSpeed's configuration of a model that is only asked: sharded parameters, no optimizer."""
    return _common(config, world_size)


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: matrices, and biases and norms, which are never decayed."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _common(config: Config, world_size: int) -> dict[str, Any]:
    dtype = config.ds.param_dtype
    return {
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": None,
        "zero_optimization": {
            "stage": config.ds.zero_stage,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "allgather_bucket_size": BUCKET_ELEMENTS,
        },
        "bf16": {"enabled": dtype == "bf16", "check_grad_overflow": True},
        "fp16": {"enabled": dtype == "fp16"},
    }


def _gradient_types(config: Config) -> dict[str, Any]:
    """Gradients are summed over micro-batches and ranks in fp32; DeepSpeed cannot do that without ZeRO."""
    if config.ds.zero_stage == 0:
        return {}
    return {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
