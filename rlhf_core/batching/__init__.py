"""From rows of tokens to balanced, padded batches per training rank."""

from rlhf_core.batching.collate import (
    ExperienceBatch,
    ImageInputs,
    ImageRow,
    PairRow,
    TokenBatch,
    TokenRow,
    collate_experiences,
    collate_pairs,
    collate_tokens,
)
from rlhf_core.batching.plan import (
    MicroBatch,
    OptimizerStep,
    RankPlans,
    plan_forward,
    plan_pairs,
    plan_step,
    plan_update,
)

__all__ = [
    "ExperienceBatch",
    "ImageInputs",
    "ImageRow",
    "MicroBatch",
    "OptimizerStep",
    "PairRow",
    "RankPlans",
    "TokenBatch",
    "TokenRow",
    "collate_experiences",
    "collate_pairs",
    "collate_tokens",
    "plan_forward",
    "plan_pairs",
    "plan_step",
    "plan_update",
]
