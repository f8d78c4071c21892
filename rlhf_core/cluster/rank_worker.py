"""What the processes of training ranks share, whatever their model.

Every rank reads the same shards, and takes its share by a plan that is a pure function of their lengths: no tensor passes
through the controller.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from rlhf_core.cluster.address import meeting_point, use_node_address
from rlhf_core.cluster.selection import rows_of_batch, trainable
from rlhf_core.cluster.staging import staging
from rlhf_core.config.model_spec import ADAPTER_EXPORT, AVERAGE_EXPORT, EXPORT
from rlhf_core.errors import StorageError, TrainingError
from rlhf_core.storage import CheckpointStore

if TYPE_CHECKING:
    from rlhf_core.cluster.context import BaseContext
    from rlhf_core.config import Config, SupervisedConfig
    from rlhf_core.records import StageRef, Trajectory
    from rlhf_core.storage import FileEntry, RunStore
    from rlhf_core.training.ranks import RankInfo
    from rlhf_core.training.trainer import EngineTrainer

Trainer = TypeVar("Trainer", bound="EngineTrainer")

NOT_STARTED = -1  # the version of a rank that holds no model yet


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place in its group, and where the group meets."""

    rank: int
    world_size: int
    address: str
    port: int


class RankWorker:
    """One rank of a model."""

    def __init__(self, context: BaseContext[Config | SupervisedConfig], group: str, rank: int) -> None:
        context.enter(f"{group}-{rank}")
        self._limits = context.config.run
        self._deterministic = context.config.train.full_determinism_enable
        self._device = context.device
        self._store = context.store

    def ping(self) -> None:
        """Answer."""

    def rendezvous(self) -> tuple[str, int]:
        """An address on this node at which the group can meet; ask rank 0."""
        return meeting_point()

    def _join(self, seat: Seat) -> RankInfo:
        """Meet the other ranks of the group."""
        use_node_address()
        from rlhf_core.training.ranks import RankInfo, init_distributed  # torch, which the controller must not load

        info = RankInfo(
            rank=seat.rank,
            world_size=seat.world_size,
            local_rank=0,  # Ray shows each process its own GPU only
            master_addr=seat.address,
            master_port=seat.port,
            device=self._device,
        )
        init_distributed(info, self._limits.stage_timeout, self._deterministic)
        return info


class TrainedWorker(RankWorker, Generic[Trainer]):
    """One rank of a model that learns. All ranks of the group must be asked together, but for ``version``."""

    def __init__(
        self, context: BaseContext[Config | SupervisedConfig], group: str, rank: int, folder: str = ""
    ) -> None:
        """``folder``: of the model's files below those of a checkpoint."""
        super().__init__(context, group, rank)
        self._export = context.config.ckpt.save_hf
        self._folder, self._name = folder, f"{group}-{rank}"
        self._trainer: Trainer | None = None

    def version(self) -> int:
        """The version the rank holds; -1 before it is started."""
        return NOT_STARTED if self._trainer is None else self._trainer.version

    def restore(self, version: int) -> int:
        """Load the checkpoint of a version. Returns the version."""
        with staging(self._store, self._name) as staged:
            prefix = str(Path(self._folder) / "state")
            folder = CheckpointStore(self._store).open_folder(version, staged, prefix=prefix)
            self._running.load(folder)
        if self._running.version != version:
            raise TrainingError(f"checkpoint {version} holds version {self._running.version}")
        return version

    def offload(self, keep_parameters: bool = False) -> None:
        """See ``EngineTrainer.offload``; nothing where no model is loaded yet."""
        if self._trainer is not None:
            self._trainer.offload(keep_parameters=keep_parameters)

    def reload(self, parameters_only: bool = False) -> None:
        """See ``EngineTrainer.reload``; nothing where no model is loaded yet."""
        if self._trainer is not None:
            self._trainer.reload(parameters_only=parameters_only)

    def digest(self) -> str:
        """sha256 of the weights."""
        return self._running.weight_digest()

    def optimizer_steps(self) -> int:
        """Optimizer steps taken."""
        return self._started.optimizer_steps

    def save(self, version: int) -> list[FileEntry]:
        """Write this rank's part of a checkpoint to the store; it counts once the controller commits it."""
        with staging(self._store, self._name) as staged:
            folder = staged / self._folder
            self._running.save(folder / "state")
            if self._export:
                self._running.export_hf(folder / EXPORT)
                if self._running.average is not None:
                    self._running.export_average(folder / AVERAGE_EXPORT)
                if self._running.has_adapters:
                    self._running.export_adapter(folder / ADAPTER_EXPORT)
            try:
                return CheckpointStore(self._store).add_files(version, staged)
            except StorageError as error:
                raise type(error)(f"{self._name} could not save checkpoint {version}: {error}") from error

    def shutdown(self) -> None:
        """Leave nothing behind that outlives the process."""

    @property
    def _running(self) -> Trainer:
        """The trainer, none of it in host memory."""
        trainer = self._started
        trainer.check_loaded()
        return trainer

    @property
    def _started(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError("the rank is not started: call start() first")
        return self._trainer


def trained_rows(store: RunStore, config: Config, rollout: StageRef, reward: StageRef) -> list[Trajectory]:
    """The rows of an iteration that are trained: the same on every rank of every model."""
    return trainable(rows_of_batch(store, rollout, reward), config.rollout.on_error)
