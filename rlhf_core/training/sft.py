"""One rank of a language model that learns given answers: supervised fine-tuning.

``agg(-log p(token)) + aux_loss_coef × share × balancing loss``, where ``agg`` divides by the trained tokens (or rows) of the
whole optimizer step, and ``share`` is the micro-batch's share of the step's rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlhf_core.algorithms.aggregation import aggregate
from rlhf_core.batching import OptimizerStep, TokenBatch, collate_tokens, plan_step
from rlhf_core.data import SftExample
from rlhf_core.training.supervised import (
    SupervisedTrainer,
    balancing_loss,
    balancing_metrics,
    loss_part,
    trained_causal_lm,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlhf_core.config.supervised import SupervisedConfig, SupervisedTrainConfig
    from rlhf_core.training.model import TokenScores
    from rlhf_core.training.ranks import RankInfo
    from rlhf_core.training.step import LossPart

SUMS = ("examples", "tokens", "nll", "aux_loss")


class SftTrainer(SupervisedTrainer[SftExample]):
    """A causal LM that learns the trained tokens of its examples.

    Args:
        config: the run's.
        model_path: Hugging Face id or folder of the starting point.
        rank: who this process is.
        total_steps: optimizer steps of the whole run.

    Raises:
        TrainingError: the model cannot be loaded.
    """

    sums = SUMS

    def __init__(self, config: SupervisedConfig, model_path: str, rank: RankInfo, total_steps: int) -> None:
        super().__init__(config, trained_causal_lm(config, model_path), rank, total_steps)

    def plan(self, examples: Sequence[SftExample]) -> OptimizerStep:
        """Rows balanced over the ranks by their tokens."""
        num_actions = [row.num_actions for row in examples]
        return plan_step(
            [i for i, count in enumerate(num_actions) if count],
            [len(row.token_ids) for row in examples],
            num_actions,
            world_size=self.rank.data_ranks,
            micro_batch_size=self.config.train.micro_batch_size,
            token_budget=self.rank.group_budget(self.config.train.token_budget),
            packed=self.config.ds.packing_samples,
        )

    def loss(self, step: OptimizerStep, examples: Sequence[SftExample]) -> LossPart:
        """See the module."""
        batch = collate_tokens(examples).to(self.rank.torch_device)
        scores = self.engine(batch.input_ids_BT, batch.action_mask_BT, batch.temperature_B, want_entropy=False)
        return sft_loss(self.config.train, step, batch, scores)

    @staticmethod
    def metrics(sums: Mapping[str, float]) -> dict[str, float]:
        """``loss`` is the mean over tokens, nats, however the loss that is trained adds them up."""
        loss = sums["nll"] / sums["tokens"]
        return {
            "loss": loss,
            "perplexity": float(torch.tensor(loss, dtype=torch.float64).exp()),  # math.exp refuses to overflow
            "tokens": sums["tokens"],
            "examples": sums["examples"],
            **balancing_metrics(sums),
        }


def sft_loss(train: SupervisedTrainConfig, step: OptimizerStep, batch: TokenBatch, scores: TokenScores) -> LossPart:
    """The loss of a micro-batch.

    Args:
        train: gives the aggregation and the weight of the balancing loss.
        step: gives the counts of the whole step.
        batch: rows of this micro-batch.
        scores: of the model, with a graph.
    """
    mask_BT, nll_BT = batch.action_mask_BT, -scores.logprobs_BT
    aux_loss = balancing_loss(scores, len(mask_BT))
    counts = {"num_tokens": step.num_tokens, "num_sequences": step.num_sequences}
    loss = (
        aggregate(nll_BT, mask_BT, train.loss_agg_mode, **counts) + train.aux_loss_coef * aux_loss / step.num_sequences
    )
    sums = {
        "examples": len(mask_BT),
        "tokens": mask_BT.sum(),
        "nll": torch.where(mask_BT, nll_BT, 0.0).sum(),
        "aux_loss": aux_loss,
    }
    return loss_part(loss, SUMS, sums)
