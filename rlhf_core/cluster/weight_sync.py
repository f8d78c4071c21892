"""The trainer's end of a weight sync: its parameters as a source, and the sender its configuration asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_core.cluster.address import meeting_point
from rlhf_core.generation.senders import Rendezvous, ShmSender, TransferSender
from rlhf_core.generation.settings import sync_backend

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from rlhf_core.cluster.context import WorkerContext
    from rlhf_core.cluster.engine_group import RayEngineGroup
    from rlhf_core.training.policy import PolicyTrainer
    from rlhf_core.weights import TensorMeta


class TrainerWeights:
    """``weights.WeightSource`` over a policy trainer. Iterating is a collective under ZeRO-3."""

    def __init__(self, trainer: PolicyTrainer) -> None:
        self._trainer = trainer

    def metadata(self) -> list[TensorMeta]:
        """Those of the plain model, whatever the ZeRO stage, with adapters or without."""
        return self._trainer.weight_metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._trainer.named_weights()


class WeightSync:
    """Sends a trainer's weights to the engines of the run; meets them anew when they have changed (nccl, ipc)."""

    def __init__(self, trainer: PolicyTrainer, context: WorkerContext) -> None:
        self._trainer = trainer
        self._context = context
        self._backend = sync_backend(context.config, context.device)
        self._source = TrainerWeights(trainer)
        self._shm = ShmSender(self._source, context.run_id, trainer.rank.rank)
        self._transfer: TransferSender | None = None
        self._met: list[Any] = []

    def send(self, group: RayEngineGroup) -> None:
        """Bring every engine to the trainer's version. All ranks call it together."""
        if self._backend == "shm":
            update = self._shm.send(self._trainer.version)
            if update is not None:
                try:
                    group.update_weights(update)
                finally:
                    self._shm.close()  # memory the size of the model; a later sync writes its own
            return
        if self._transfer is None or group.identity != self._met:
            self._meet(group)
        assert self._transfer is not None, "_meet makes it"
        self._transfer.send(self._trainer.version)

    def close(self) -> None:
        """Leave nothing behind: no file in shared memory, no group."""
        self._shm.close()
        if self._transfer is not None:
            self._transfer.close()

    def _meet(self, group: RayEngineGroup) -> None:
        if self._transfer is not None:
            self._transfer.close()
        rank = self._trainer.rank
        rendezvous = None
        if self._backend == "nccl":
            address, port = meeting_point()
            rendezvous = Rendezvous(address, port, self._context.config.vllm.tensor_parallel_size)
        self._transfer = TransferSender.connect(self._backend, self._source, group, rank.rank, rendezvous)
        self._met = group.identity
