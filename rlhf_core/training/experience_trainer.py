"""What policy and critic share: they learn from the same experiences, in the same optimizer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.batching import collate_experiences, plan_update
from rlhf_core.telemetry import get_logger
from rlhf_core.training.ahead import ahead
from rlhf_core.training.scoring import first_bad_row
from rlhf_core.training.trainer import EngineTrainer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rlhf_core.batching import ExperienceBatch, MicroBatch, OptimizerStep
    from rlhf_core.config import Config
    from rlhf_core.records import Experience
    from rlhf_core.training.step import LossPart, StepTally
    from rlhf_core.training.visual import ImageReader
    from rlhf_core.vision import VisionProcessor

logger = get_logger(__name__)


class ExperienceTrainer(EngineTrainer):
    """An ``EngineTrainer`` that learns from experiences."""

    config: Config
    _images: ImageReader | None  # None: the run shows none

    @property
    def image_processor(self) -> VisionProcessor | None:
        """What reads the images; None if the run shows none."""
        return None if self._images is None else self._images.processor

    def plan(self, rows: Sequence[Experience], iteration: int) -> list[OptimizerStep]:
        """The optimizer steps of an update: the same rows in the same order for policy and critic."""
        train = self.config.train
        return plan_update(
            [len(row.token_ids) for row in rows],
            [row.num_actions for row in rows],
            world_size=self.rank.data_ranks,
            samples_per_step=self.config.samples_per_step,
            max_epochs=train.max_epochs,
            seed=train.seed,
            iteration=iteration,
            micro_batch_size=train.micro_batch_size,
            token_budget=self.rank.group_budget(train.token_budget),
            packed=self.config.ds.packing_samples,
            episodes=[(row.group_id, row.sample_index) for row in rows],
        )

    def learn(
        self,
        step: OptimizerStep,
        rows: Sequence[Experience],
        loss_of: Callable[[MicroBatch], LossPart],
        names: Sequence[str],
    ) -> tuple[StepTally | None, float | None]:
        """As ``take_step``; a step with a number that is not finite is not even begun: (None, None)."""
        bad = first_bad_row(step, rows)
        if bad is not None:
            logger.warning(
                "step skipped: group %s sample %s has a number that is not finite", bad.group_id, bad.sample_index
            )
            return None, None
        return self.take_step(step.micro_batches, loss_of, names)

    def batches(self, step: OptimizerStep, rows: Sequence[Experience]) -> Iterator[ExperienceBatch]:
        """Those of this rank, in the order of its micro-batches."""
        parts = ([rows[i] for i in micro_batch.rows] for micro_batch in step.micro_batches[self.rank.data_rank])
        return map(collate_experiences, parts) if self._images is None else ahead(self._images.experiences, parts)
