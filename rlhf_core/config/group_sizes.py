"""How many processes each model of a run has: what placement, and the rules about sharing GPUs, count with."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf_core.config.model import Config


def engines_of(config: Config) -> int:
    """Engines of a run; a replay has none."""
    return 0 if config.is_replay else config.vllm.num_engines


def model_ranks(config: Config) -> dict[str, int]:
    """Processes of each model besides the engines, by role; 0: the run has no such model."""
    ref, critic = config.ref, config.critic
    return {
        "policy": config.actor.world_size,
        "critic": critic.world_size if config.needs_critic else 0,
        "reference": ref.num_nodes * ref.num_gpus_per_node if config.needs_reference else 0,
        "reward": config.reward.model_num_ranks
        if config.scores and config.reward.model_name_or_path is not None
        else 0,
    }
