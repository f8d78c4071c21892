"""One rank of PPO's critic: values rows, learns from the returns of the experiences.

It takes the same optimizer steps over the same rows as the policy, with an optimizer of its own, and may do so at the same
time: neither looks at the other during an update.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from rlhf_core.algorithms.aggregation import aggregate
from rlhf_core.algorithms.losses import ValueLossInput, value_loss
from rlhf_core.errors import TrainingError
from rlhf_core.records import ActionRange
from rlhf_core.training.experience_trainer import ExperienceTrainer
from rlhf_core.training.lora import add_adapters
from rlhf_core.training.scoring import map_rows
from rlhf_core.training.step import LossPart, StepsTally, no_loss
from rlhf_core.training.trainer import TrainedModel, seed_everything
from rlhf_core.training.value_model import ValueScorer, load_sequence_model
from rlhf_core.training.visual import ImageReader, eyes_learn, freeze_visual_encoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from rlhf_core.batching import ExperienceBatch, ImageRow, MicroBatch, OptimizerStep, TokenBatch
    from rlhf_core.config import Config
    from rlhf_core.records import Experience, ImageRef
    from rlhf_core.training.ranks import RankInfo
    from rlhf_core.training.visual import ImageLoader

# Sums over action tokens, or shares of the step's loss. Returns and errors (return minus old value) as (sum, sum of squares).
SUMS = ("loss", "tokens", "clipped", "value", "return", "return_squared", "error", "error_squared")


@dataclass(frozen=True, slots=True)
class WithNextToken:
    """A row that goes on by one action token after its last one: the value before that token is asked for too."""

    token_ids: NDArray[np.int32]
    action_ranges: tuple[ActionRange, ...]
    temperature: float
    images: tuple[ImageRef, ...]

    @classmethod
    def of(cls, row: ImageRow) -> WithNextToken:
        """The longer row; which token comes next does not matter, for nothing looks at it."""
        *before, (start, end) = row.action_ranges
        return cls(
            np.append(row.token_ids, np.int32(0)), (*before, ActionRange(start, end + 1)), row.temperature, row.images
        )


class CriticTrainer(ExperienceTrainer):
    """The critic under DeepSpeed: an ``EngineTrainer`` whose model gives one number a token.

    Raises:
        TrainingError: the model cannot be loaded with such a head.
    """

    def __init__(
        self,
        config: Config,
        model_path: str,
        rank: RankInfo,
        total_steps: int,
        load_image: ImageLoader | None = None,
    ) -> None:
        self.config = config
        seed_everything(config.train.seed)
        self._images = ImageReader.of(config, model_path, load_image, learns=eyes_learn(config))
        # A new head is zero: one that knows nothing says nothing. The values of a random one spread by about 1, the advantages
        # are then its noise, and the first steps of the backbone throw them farther off than they were.
        sequence_model = load_sequence_model(config, model_path, seed=None, reads_images=self._images is not None)
        if config.actor.freeze_visual_encoder:
            freeze_visual_encoder(sequence_model)
        scorer = ValueScorer(sequence_model, config.ds.packing_samples)
        heads, template = tuple(scorer.head.parameters()), config.data.tokenizer_chat_template
        add_adapters(sequence_model, config.ds.lora, config.train.seed, trained_too=heads)
        model = TrainedModel(scorer, sequence_model, heads, model_path, config.critic, template)
        super().__init__(model, config.ds, rank, total_steps)

    def values(self, rows: Sequence[ImageRow], bootstrap: bool = False) -> dict[int, NDArray[np.float32]]:
        """Values of this rank's share of the rows, by index of the row: ``[T]``, index t before token t, 0 outside actions.

        Args:
            rows: all of them, the same on every rank; each has an action.
            bootstrap: ``[T + 1]`` instead: the index after the last action is the value of what would follow it.
        """
        self.engine.eval()

        def forward(batch: TokenBatch) -> torch.Tensor:
            return self.engine(batch.input_ids_BT, batch.action_mask_BT, images=batch.images)

        asked = [WithNextToken.of(row) for row in rows] if bootstrap else rows
        return map_rows(forward, asked, self.rank, self.config, self._images)

    def update(self, rows: Sequence[Experience], iteration: int) -> dict[str, float]:
        """Train on the returns of one iteration. Returns metrics by name, the same on every rank; see ``PolicyTrainer``."""
        started = time.monotonic()
        tally = StepsTally(SUMS)
        lr = self.next_lr
        with self.updating():
            for step in self.plan(rows, iteration):
                lr = self.next_lr
                self._take_step(step, rows, tally)
        return {
            **_means(tally.sums, tally.applied),
            "grad_norm": tally.grad_norm,
            "lr": lr,
            "applied_steps": float(tally.applied),
            "skipped_steps": float(tally.skipped),
            "memory_gib": self.rank.peak_memory_gib(),
            "seconds": time.monotonic() - started,
        }

    def _take_step(self, step: OptimizerStep, rows: Sequence[Experience], tally: StepsTally) -> None:
        batches = self.batches(step, rows)
        tally.add(*self.learn(step, rows, lambda part: self._loss(step, part, next(batches)), SUMS))

    def _loss(self, step: OptimizerStep, micro_batch: MicroBatch, batch: ExperienceBatch) -> LossPart:
        batch = batch.to(self.rank.torch_device)
        mask_BT = batch.tokens.action_mask_BT
        values_BT = self.engine(batch.tokens.input_ids_BT, mask_BT, images=batch.tokens.images)
        if micro_batch.filler:
            return no_loss(values_BT, len(SUMS))
        if batch.values_BT is None:
            raise TrainingError("experience without values: it was made by a run without a critic")
        result = value_loss(
            ValueLossInput(values_BT, batch.values_BT, batch.returns_BT, mask_BT, self.config.critic.value_clip)
        )
        loss = aggregate(result.loss_BT, mask_BT, "token", num_tokens=step.num_tokens, num_sequences=step.num_sequences)
        returns_N = batch.returns_BT[mask_BT].double()
        errors_N = returns_N - batch.values_BT[mask_BT].double()
        sums = (
            loss.detach(),
            result.num_tokens,
            result.clipped_sum,
            values_BT.detach()[mask_BT].sum(),
            returns_N.sum(),
            returns_N.square().sum(),
            errors_N.sum(),
            errors_N.square().sum(),
        )
        return LossPart(loss, torch.stack([value.to(torch.float64) for value in sums]))


def _means(sums: dict[str, float], steps: int) -> dict[str, float]:
    """Means over the action tokens of the applied steps."""
    tokens = max(sums["tokens"], 1.0)
    metrics = {
        "loss": sums["loss"] / max(steps, 1),
        "clip_fraction": sums["clipped"] / tokens,
        "value_mean": sums["value"] / tokens,
        "return_mean": sums["return"] / tokens,
    }
    explained = explained_variance(tokens, sums)
    return metrics if math.isnan(explained) else {**metrics, "explained_variance": explained}


def explained_variance(tokens: float, sums: dict[str, float]) -> float:
    """``1 - Var(return - old value) / Var(return)``: 1 for a critic that knew; NaN where all returns are equal."""

    def variance(name: str) -> float:
        return sums[f"{name}_squared"] / tokens - (sums[name] / tokens) ** 2

    spread = variance("return")
    return 1 - variance("error") / spread if spread > 1e-12 else math.nan
