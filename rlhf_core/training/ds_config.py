"""From our configuration to DeepSpeed's.

DeepSpeed's own scaling is switched off where it can be, and undone where it cannot: accumulation steps are 1 here (the
trainer says which backward is the last), and the mean that DeepSpeed takes over ranks is undone by ``EngineTrainer``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_core.config.trained import DeepSpeedConfig, TrainedModelConfig

SHARDED_PARAMETERS = 3  # the ZeRO stage
BUCKET_ELEMENTS = 50_000_000  # per collective; the buffer of this size is allocated in any case


def trained_config(ds: DeepSpeedConfig, settings: TrainedModelConfig) -> dict[str, Any]:
    """DeepSpeed's configuration of a model that is trained, by an optimizer of ``optimizers.py``."""
    body = frozen_config(ds, settings.world_size // ds.tensor_parallel_size)
    muon = settings.optim == "muon"
    if muon:
        body["zero_optimization"]["reduce_scatter"] = False  # it orthogonalises whole gradients
    if ds.adam_offload:
        body["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if ds.zpg > 1:
        body["zero_optimization"]["zero_hpz_partition_size"] = ds.zpg
    return {
        **body,
        # With ZeRO, DeepSpeed would clip what Muon made of the gradients: large orthogonal matrices, whatever the gradients.
        "gradient_clipping": 0.0 if muon else settings.max_norm,
        "zero_allow_untested_optimizer": True,  # Muon with AdamW, which is DeepSpeed's own
        # torch's fused AdamW has kernels for the CPU too; DeepSpeed's own would be compiled by whoever first uses it.
        "zero_force_ds_cpu_optimizer": False,
        **_gradient_types(ds),
    }


def frozen_config(ds: DeepSpeedConfig, world_size: int) -> dict[str, Any]:
    """DeepSpeed's configuration of a model that is only asked: sharded parameters, no optimizer.

    ``world_size``: ranks that have the same numbers, or shards of them.
    """
    dtype = ds.param_dtype
    return {
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": None,
        "zero_optimization": {
            "stage": ds.zero_stage,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "allgather_bucket_size": BUCKET_ELEMENTS,
        },
        "bf16": {"enabled": dtype == "bf16", "check_grad_overflow": True},
        "fp16": {"enabled": dtype == "fp16"},
    }


def _gradient_types(ds: DeepSpeedConfig) -> dict[str, Any]:
    """Gradients are summed over micro-batches and ranks in fp32; DeepSpeed cannot do that without ZeRO."""
    if ds.zero_stage == 0:
        return {}
    return {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
