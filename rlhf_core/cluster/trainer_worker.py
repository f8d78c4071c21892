"""The processes that hold trained and reference models: one a rank.

Every rank reads the same shards, and takes its share by a plan that is a pure function of their lengths: no tensor passes
through the controller.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.cluster.address import meeting_point
from rlhf_core.cluster.engine_group import RayEngineGroup
from rlhf_core.cluster.selection import trainable, with_rewards
from rlhf_core.data import resolve_model
from rlhf_core.errors import TrainingError
from rlhf_core.storage import CheckpointStore

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rlhf_core.cluster.context import WorkerContext
    from rlhf_core.cluster.weight_sync import WeightSync
    from rlhf_core.records import StageRef, Trajectory
    from rlhf_core.storage import FileEntry
    from rlhf_core.training.policy import PolicyTrainer
    from rlhf_core.training.ranks import RankInfo
    from rlhf_core.training.reference import ReferenceModel


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place in its group, and where the group meets."""

    rank: int
    world_size: int
    address: str
    port: int


class RankWorker:
    """What policy and reference ranks share."""

    def __init__(self, context: WorkerContext, group: str, rank: int) -> None:
        context.enter(f"{group}-{rank}")
        self._context = context
        self._config = context.config
        self._store = context.store

    def ping(self) -> None:
        """Answer."""

    def rendezvous(self) -> tuple[str, int]:
        """An address on this node at which the group can meet; ask rank 0."""
        return meeting_point()

    def _join(self, seat: Seat) -> RankInfo:
        """Meet the other ranks of the group."""
        from rlhf_core.training.ranks import RankInfo, init_distributed  # torch, which the controller must not load

        info = RankInfo(
            rank=seat.rank,
            world_size=seat.world_size,
            local_rank=0,  # Ray shows each process its own GPU only
            master_addr=seat.address,
            master_port=seat.port,
            device=self._context.device,
        )
        init_distributed(info, self._config.run.stage_timeout, self._config.train.full_determinism_enable)
        return info

    def _rows(self, rollout: StageRef, reward: StageRef) -> list[Trajectory]:
        store = self._store
        scored = store.read_rewards(store.read_manifest(reward).parts)
        rows = with_rewards(
            store.read_trajectories(store.read_manifest(rollout).parts),
            {(row.group_id, row.sample_index): row.result for row in scored},
        )
        return trainable(rows, self._config.rollout.on_error)


class PolicyWorker(RankWorker):
    """Ray actor around one rank of the policy."""

    def __init__(self, context: WorkerContext, rank: int) -> None:
        super().__init__(context, "policy", rank)
        self._trainer: PolicyTrainer | None = None
        self._sync: WeightSync | None = None

    def start(self, seat: Seat, total_steps: int) -> int:
        """Load the model as it was before training. Returns the policy version: 0 if it was not started before."""
        from rlhf_core.training.policy import PolicyTrainer

        if self._trainer is None:
            model = resolve_model(self._config.actor.model_name_or_path, self._context.model_cache)
            self._trainer = PolicyTrainer(self._config, model, self._join(seat), total_steps)
        return self._trainer.version

    def version(self) -> int:
        """The policy version the rank holds; -1 before it is started."""
        return -1 if self._trainer is None else self._trainer.version

    def restore(self, version: int) -> int:
        """Load the checkpoint of a version. Returns the version."""
        with tempfile.TemporaryDirectory(prefix="rlhf-restore-") as staging:
            folder = CheckpointStore(self._store).open_folder(version, Path(staging), prefix="state")
            self._running.load(folder)
        if self._running.version != version:
            raise TrainingError(f"checkpoint {version} holds policy version {self._running.version}")
        return version

    def logprobs(self, rollout: StageRef, reward: StageRef) -> dict[tuple[str, int, int], NDArray[np.float32]]:
        """Log-probs of this rank's share of the trained rows, ``[T]`` each."""
        rows = self._rows(rollout, reward)
        return {rows[index].key: values for index, values in self._running.logprobs(rows).items()}

    def update(self, iteration: int, experience: StageRef, kl_coef: float) -> dict[str, float]:
        """Train on the rows of an iteration; the version goes up by one. Returns the metrics, the same on every rank."""
        rows = self._store.read_experience(self._store.read_manifest(experience).parts)
        metrics = self._running.update(rows, iteration, kl_coef=kl_coef).metrics()
        return {f"update/{name}": value for name, value in metrics.items() if math.isfinite(value)}

    def digest(self) -> str:
        """sha256 of the weights. All ranks must be asked together."""
        return self._running.weight_digest()

    def optimizer_steps(self) -> int:
        """Optimizer steps taken."""
        return self._running.optimizer_steps

    def save(self, version: int) -> list[FileEntry]:
        """Write this rank's part of a checkpoint to the store; it counts once the controller commits it."""
        with tempfile.TemporaryDirectory(prefix="rlhf-save-") as staging:
            folder = Path(staging)
            self._running.save(folder / "state")
            if self._config.ckpt.save_hf:
                self._running.export_hf(folder / "hf")
            return CheckpointStore(self._store).add_files(version, folder)

    def sync(self, engines: list[Any], timeout: float) -> None:
        """Hand the weights to every engine. All ranks must be asked together."""
        from rlhf_core.cluster.weight_sync import WeightSync  # vLLM's senders, which the controller must not load

        if self._sync is None:
            self._sync = WeightSync(self._running, self._context)
        self._sync.send(RayEngineGroup(engines, timeout))

    def shutdown(self) -> None:
        """Leave nothing behind that outlives the process."""
        if self._sync is not None:
            self._sync.close()

    @property
    def _running(self) -> PolicyTrainer:
        if self._trainer is None:
            raise RuntimeError("the rank is not started: call start() first")
        return self._trainer


class ReferenceWorker(RankWorker):
    """Ray actor around one rank of the reference model."""

    def __init__(self, context: WorkerContext, rank: int) -> None:
        super().__init__(context, "reference", rank)
        self._model: ReferenceModel | None = None

    def start(self, seat: Seat) -> None:
        """Load the model, if it is not loaded."""
        from rlhf_core.training.reference import ReferenceModel

        if self._model is None:
            name = self._config.ref.model_name_or_path or self._config.actor.model_name_or_path
            self._model = ReferenceModel(self._config, resolve_model(name, self._context.model_cache), self._join(seat))

    def logprobs(self, rollout: StageRef, reward: StageRef) -> dict[tuple[str, int, int], NDArray[np.float32]]:
        """Log-probs of this rank's share of the trained rows, ``[T]`` each."""
        rows = self._rows(rollout, reward)
        if self._model is None:
            raise RuntimeError("the rank is not started: call start() first")
        return {rows[index].key: values for index, values in self._model.logprobs(rows).items()}
