"""The processes of the policy and of the reference model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rlhf_core.cluster.engine_group import RayEngineGroup
from rlhf_core.cluster.image_intake import check_image_processor
from rlhf_core.cluster.images import image_loader
from rlhf_core.cluster.rank_worker import RankWorker, TrainedWorker, trained_rows
from rlhf_core.telemetry import get_logger, in_stage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rlhf_core.cluster.context import WorkerContext
    from rlhf_core.cluster.rank_worker import Seat
    from rlhf_core.cluster.weight_sync import WeightSync
    from rlhf_core.records import StageRef
    from rlhf_core.training.policy import PolicyTrainer  # noqa: F401  what the base class is of
    from rlhf_core.training.reference import ReferenceModel


logger = get_logger(__name__)


class PolicyWorker(TrainedWorker["PolicyTrainer"]):
    """Ray actor around one rank of the policy."""

    def __init__(self, context: WorkerContext, rank: int) -> None:
        super().__init__(context, "policy", rank)
        self._context, self._config = context, context.config
        self._sync: WeightSync | None = None

    def start(self, seat: Seat, total_steps: int) -> int:
        """Load the model as it was before training. Returns the policy version: 0 if it was not started before."""
        from rlhf_core.training.policy import PolicyTrainer

        if self._trainer is None:
            model = self._context.model("policy")
            trainer = PolicyTrainer(self._config, model, self._join(seat), total_steps, image_loader(self._store))
            check_image_processor(self._store, trainer.image_processor)
            self._trainer = trainer
        return self._trainer.version

    @in_stage("advantage")
    def logprobs(self, rollout: StageRef, reward: StageRef) -> dict[tuple[str, int, int], NDArray[np.float32]]:
        """Log-probs of this rank's share of the trained rows, ``[T]`` each."""
        rows = trained_rows(self._store, self._config, rollout, reward)
        return {rows[index].key: values for index, values in self._running.logprobs(rows).items()}

    @in_stage("update")
    def update(self, iteration: int, experience: StageRef, kl_coef: float) -> dict[str, float]:
        """Train on the rows of an iteration; the version goes up by one. Returns the metrics, the same on every rank."""
        rows = self._store.read_experience(self._store.read_manifest(experience).parts)
        frozen = self._config.needs_critic and iteration < self._config.critic.freezing_steps
        report = self._running.update(rows, iteration, kl_coef, frozen)
        logger.info("trained on %d rows: version %d", len(rows), self._running.version)
        metrics = {f"update/{name}": value for name, value in report.metrics().items()} | report.advantage_metrics()
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    @in_stage("weight sync")
    def sync(self, engines: list[Any], timeout: float) -> None:
        """Hand the weights to every engine."""
        from rlhf_core.cluster.weight_sync import WeightSync  # vLLM's senders, which the controller must not load

        trainer = self._started
        trainer.check_loaded(parameters_only=True)
        if self._sync is None:
            self._sync = WeightSync(trainer, self._context)
        self._sync.send(RayEngineGroup(engines, timeout))

    def shutdown(self) -> None:
        """Leave nothing behind that outlives the process."""
        if self._sync is not None:
            self._sync.close()


class ReferenceWorker(RankWorker):
    """Ray actor around one rank of the reference model."""

    def __init__(self, context: WorkerContext, rank: int) -> None:
        super().__init__(context, "reference", rank)
        self._context, self._config = context, context.config
        self._model: ReferenceModel | None = None

    def start(self, seat: Seat) -> None:
        """Load the model, if it is not loaded."""
        from rlhf_core.training.reference import ReferenceModel

        if self._model is None:
            model, load = self._context.model("reference"), image_loader(self._store)
            reference = ReferenceModel(self._config, model, self._join(seat), load)
            if model == self._context.model("policy"):  # another model has eyes of its own
                check_image_processor(self._store, reference.image_processor)
            self._model = reference

    def offload(self) -> None:
        """See ``ReferenceModel.offload``; nothing where it is not loaded yet."""
        if self._model is not None:
            self._model.offload()

    def reload(self) -> None:
        """See ``ReferenceModel.reload``; nothing where it is not loaded yet."""
        if self._model is not None:
            self._model.reload()

    def logprobs(self, rollout: StageRef, reward: StageRef) -> dict[tuple[str, int, int], NDArray[np.float32]]:
        """Log-probs of this rank's share of the trained rows, ``[T]`` each."""
        rows = trained_rows(self._store, self._config, rollout, reward)
        if self._model is None:
            raise RuntimeError("the rank is not started: call start() first")
        return {rows[index].key: values for index, values in self._model.logprobs(rows).items()}
