"""The processes of PPO's critic."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rlhf_core.cluster.image_intake import check_image_processor
from rlhf_core.cluster.images import image_loader
from rlhf_core.cluster.rank_worker import TrainedWorker, trained_rows
from rlhf_core.telemetry import in_stage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rlhf_core.cluster.context import WorkerContext
    from rlhf_core.cluster.rank_worker import Seat
    from rlhf_core.records import StageRef
    from rlhf_core.training.critic import CriticTrainer  # noqa: F401  what the base class is of

FOLDER = "critic"  # of its files below those of a checkpoint


class CriticWorker(TrainedWorker["CriticTrainer"]):
    """Ray actor around one rank of the critic."""

    def __init__(self, context: WorkerContext, rank: int) -> None:
        super().__init__(context, "critic", rank, FOLDER)
        self._context, self._config = context, context.config

    def start(self, seat: Seat, total_steps: int) -> int:
        """Load the model as it was before training. Returns its version: 0 if it was not started before."""
        from rlhf_core.training.critic import CriticTrainer

        if self._trainer is None:
            model = self._context.model("critic")
            trainer = CriticTrainer(self._config, model, self._join(seat), total_steps, image_loader(self._store))
            if model == self._context.model("policy"):  # another model has eyes of its own
                check_image_processor(self._store, trainer.image_processor)
            self._trainer = trainer
        return self._trainer.version

    @in_stage("advantage")
    def values(self, rollout: StageRef, reward: StageRef) -> dict[tuple[str, int, int], NDArray[np.float32]]:
        """Values of this rank's share of the trained rows: see ``CriticTrainer.values``."""
        rows = trained_rows(self._store, self._config, rollout, reward)
        values = self._running.values(rows, self._config.algo.advantage.bootstrap_truncated)
        return {rows[index].key: of_row for index, of_row in values.items()}

    @in_stage("update")
    def update(self, iteration: int, experience: StageRef) -> dict[str, float]:
        """Train on the rows of an iteration; the version goes up by one. Returns the metrics, the same on every rank."""
        rows = self._store.read_experience(self._store.read_manifest(experience).parts)
        metrics = self._running.update(rows, iteration)
        return {f"critic/{name}": value for name, value in metrics.items() if math.isfinite(value)}
