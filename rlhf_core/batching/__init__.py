"""From rows of tokens to balanced, padded batches per training rank."""

from rlhf_core.batching.collate import ExperienceBatch, TokenBatch, TokenRow, collate_experiences, collate_tokens
from rlhf_core.batching.plan import MicroBatch, OptimizerStep, RankPlans, plan_forward, plan_update

__all__ = [
    "ExperienceBatch",
    "MicroBatch",
    "OptimizerStep",
    "RankPlans",
    "TokenBatch",
    "TokenRow",
    "collate_experiences",
    "collate_tokens",
    "plan_forward",
    "plan_update",
]
