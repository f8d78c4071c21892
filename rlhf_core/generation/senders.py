"""The trainer's side of a weight sync, chosen by ``vllm.sync_backend``.

::

    shm     ShmSender.send(v)       every rank iterates the source, rank 0 writes a packed file ─▶ WeightUpdate,
                                    which the controller hands to every engine
    nccl    TransferSender.send(v)  every rank iterates the source, vLLM's trainer engine on rank 0 tells the engines
    ipc                             through the EngineGroup and moves the tensors GPU to GPU meanwhile
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import WeightSyncError
from rlhf_core.weights import WeightUpdate, scratch_folder, total_bytes, write_packed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

    from rlhf_core.weights import EngineGroup, WeightSource


class ShmSender:
    """Packed files in shared memory; the newest is kept for engines that start later, older ones are deleted."""

    def __init__(self, source: WeightSource, tag: str, rank: int) -> None:
        """``tag`` names the run in the file names; every training rank makes a sender, rank 0 writes."""
        self._source = source
        self._tag = tag
        self._rank = rank
        self._newest: Path | None = None

    def send(self, version: int) -> WeightUpdate | None:
        """Write the source's weights as policy ``version``; the update to hand to the engines, None off rank 0.

        Raises:
            WeightSyncError: there is no room for them.
        """
        if self._rank != 0:
            for _ in self._source:  # takes part in gathering each tensor
                pass
            return None
        path = scratch_folder(total_bytes(self._source)) / f"rlhf-{self._tag}-v{version:08d}.pack"
        checksum = write_packed(path, self._source, version)
        self._delete_others(path)
        self._newest = path
        payload = {"path": str(path), "version": version, "checksum": checksum}
        return WeightUpdate(version=version, backend="shm", payload=payload, checksum=checksum)

    def close(self) -> None:
        """Delete the newest file too."""
        if self._newest is not None:
            self._newest.unlink(missing_ok=True)

    def _delete_others(self, newest: Path) -> None:
        """Also those that a killed process of this run left behind."""
        folders = {newest.parent} | ({self._newest.parent} if self._newest is not None else set())
        for folder in folders:
            for path in folder.glob(f"rlhf-{self._tag}-v*.pack"):
                if path != newest:
                    path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where rank 0 of the trainer and all engine workers meet (nccl)."""

    address: str
    port: int
    workers_per_engine: int  # tensor_parallel_size


class TransferSender:
    """vLLM's own trainer engine for ``nccl`` or ``ipc``, driven through an ``EngineGroup``."""

    def __init__(self, engine: Any, client: EngineClient) -> None:
        self._engine = engine
        self._client = client

    @classmethod
    def connect(
        cls, backend: str, source: WeightSource, group: EngineGroup, rank: int, rendezvous: Rendezvous | None = None
    ) -> TransferSender:
        """Meet the engines. Every training rank calls this at the same time; rank 0 talks to the engines.

        Raises:
            WeightSyncError: the backend is unknown, or nccl was given no rendezvous.
        """
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        client = EngineClient(group, backend, rendezvous.workers_per_engine if rendezvous is not None else 1)
        init_info = _trainer_init_info(backend, rank, group.num_engines, rendezvous)
        engine = WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=_vllm_source(source))
        return cls(engine, client)

    def send(self, version: int) -> None:
        """Bring every engine to policy ``version``. Called on every training rank.

        Raises:
            WeightSyncError: an engine did not take the weights.
        """
        self._client.version = version
        self._engine.send_weights()

    def close(self) -> None:
        """Leave the group."""
        self._engine.shutdown()


class EngineClient:
    """vLLM's four-call ``VLLMWeightSyncClient``, as one ``WeightUpdate`` a round.

    Our engines start, load, finish and resume within ``update_weights``, so the calls around it have nothing to do.
    """

    def __init__(self, group: EngineGroup, backend: str, workers_per_engine: int) -> None:
        self.version = -1
        self._group = group
        self._backend = backend
        self._workers_per_engine = workers_per_engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Each engine's workers get their own ranks behind those of the engines before it."""
        infos = [dict(init_info) for _ in range(self._group.num_engines)]
        if "rank_offset" in init_info:
            for index, info in enumerate(infos):
                info["rank_offset"] += index * self._workers_per_engine
        self._group.init_weight_transfer(infos)

    def start_weight_update(self) -> None:
        """Part of ``update_weights``."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """The whole round on every engine."""
        self._group.update_weights(WeightUpdate(self.version, self._backend, payload=update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Part of ``update_weights``."""


def _trainer_init_info(backend: str, rank: int, num_engines: int, rendezvous: Rendezvous | None) -> Any:
    if backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=rank)  # unpacked: one call a round, and no copy of the weights
    if backend != "nccl":
        raise WeightSyncError(f"vllm.sync_backend={backend!r} is not a transfer between GPUs: use 'nccl' or 'ipc'")
    if rendezvous is None:
        raise WeightSyncError("the nccl backend needs a rendezvous: give the address and port of training rank 0")
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    world_size = 1 + num_engines * rendezvous.workers_per_engine
    return NCCLTrainerInitInfo(rendezvous.address, rendezvous.port, world_size, rank=rank)


def _vllm_source(source: WeightSource) -> Any:
    """``source`` as the class that vLLM's trainer engines know."""
    from vllm.distributed.weight_transfer import base

    class Source(base.WeightSource):  # type: ignore[misc]  # vLLM has no types
        def metadata(self) -> list[Any]:
            return [base.ParamMeta(meta.name, meta.dtype, meta.shape) for meta in source.metadata()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(source)

    return Source()
