"""The trainer of each supervised method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_core.training.pairwise import DpoTrainer, RewardModelTrainer
from rlhf_core.training.sft import SftTrainer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlhf_core.config import Method, SupervisedConfig
    from rlhf_core.training.ranks import RankInfo
    from rlhf_core.training.supervised import SupervisedTrainer


def make_trainer(
    method: Method, config: SupervisedConfig, models: Mapping[str, str], rank: RankInfo, total_steps: int
) -> SupervisedTrainer[Any]:
    """One rank of the method's trainer.

    Args:
        method: which loss.
        config: the run's.
        models: ``policy``, what is trained, and for DPO ``reference``: folders or Hugging Face ids.
        rank: who this process is.
        total_steps: optimizer steps of the whole run.

    Raises:
        TrainingError: a model cannot be loaded.
    """
    if method == "sft":
        return SftTrainer(config, models["policy"], rank, total_steps)
    if method == "reward_model":
        return RewardModelTrainer(config, models["policy"], rank, total_steps)
    return DpoTrainer(config, models["policy"], rank, total_steps, models["reference"])
