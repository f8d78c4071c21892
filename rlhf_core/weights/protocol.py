"""What one weight sync consists of, and the two sides of it.

::

    WeightSource ──▶ a sender (generation.senders) ── WeightUpdate ──▶ WeightReceiver (one per engine)
    the trainer's     shm: writes a packed file        version,        pauses, loads, verifies,
    parameters        nccl, ipc: vLLM's own engines    payload         stamps the version, resumes
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What a source will yield under ``name``."""

    name: str  # as in the Hugging Face checkpoint
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One sync round, as an engine is told of it. Small and picklable: the weights travel on their own path."""

    version: int  # the policy version that the engine holds afterwards
    backend: str  # "shm", "nccl" or "ipc"
    payload: dict[str, Any] = field(default_factory=dict)  # what the backend's engine needs to find the weights
    checksum: str = ""  # of the weights, where the backend has one


class WeightSource(Protocol):
    """The trainer's parameters, whole, one after another; the same names in the same order in every round.

    Where parameters are sharded, iterating is a collective: every rank iterates, the sending rank uses the tensors.
    """

    def metadata(self) -> Sequence[TensorMeta]:
        """What iteration yields, without moving anything."""
        ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, whole tensor)."""
        ...


class WeightReceiver(Protocol):
    """An engine, as weight sync sees it."""

    @property
    def version(self) -> int:
        """The policy version it speaks with."""
        ...

    async def update_weights(self, update: WeightUpdate) -> None:
        """Take new weights, all or an error.

        Raises:
            WeightSyncError: they did not arrive whole; the message holds the engine's own text.
            DeadlineError: the engine did not answer within its limit.
        """
        ...


class EngineGroup(Protocol):
    """All engines of a run, called together from a training rank; each call returns when the last engine has."""

    @property
    def num_engines(self) -> int:
        """How many there are."""
        ...

    def init_weight_transfer(self, init_infos: Sequence[dict[str, Any]]) -> None:
        """Hand engine ``i`` the ``i``-th rendezvous."""
        ...

    def update_weights(self, update: WeightUpdate) -> None:
        """``WeightReceiver.update_weights`` on every engine at the same time."""
        ...


def total_bytes(source: WeightSource) -> int:
    """Bytes that one round moves."""
    return sum(math.prod(meta.shape) * meta.dtype.itemsize for meta in source.metadata())
