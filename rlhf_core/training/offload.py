"""What a model holds on its device, moved to host memory and back while somebody else needs the device.

::

    tensors of model, optimizer, DeepSpeed ──▶ the storages below them
                                                 offload: copied to the host, shrunk to nothing
                                                 reload:  grown again, copied back

Storages move, not tensors: parameters, flat groups, master weights and optimizer states are views of one another in ways that
differ by ZeRO stage, and every view holds again once its storage is back. DeepSpeed's own ``offload_states`` replaces tensors
instead: it exists for ZeRO 1 to 3 only (not for 1 in bf16), asks for DeepSpeed's FusedAdam under ZeRO 3, and what still refers
to the old tensors keeps their memory.
"""

from __future__ import annotations

import dataclasses
import gc
from typing import TYPE_CHECKING, Any

import torch

from rlhf_core.training.fragments import inner_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn

# Page-locked memory comes in powers of two: a copy in pieces of one wastes less than a piece.
PIECE_BYTES = 256 * 2**20


class HostOffload:
    """The storages below some tensors, on their device or in host memory.

    A tensor whose storage is away must not be touched: torch reads freed memory then. ``check_here`` first.

    Args:
        tensors: all that there are, now.
        device: where they live; those elsewhere are let be.
    """

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]], device: torch.device) -> None:
        self._tensors, self._device = tensors, device
        self._away: dict[int, _Copy] = {}

    @property
    def bytes_away(self) -> int:
        """In host memory now."""
        return sum(copy.num_bytes for copy in self._away.values())

    def check_here(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Return if all is on the device, or what these tensors lie in.

        Raises:
            RuntimeError: it is not.
        """
        away = self._away if tensors is None else self._away.keys() & _keys(tensors)
        if away:
            raise RuntimeError(f"{len(away)} tensors of the model are in host memory: reload() before they are used")

    def offload(self, keep: Iterable[torch.Tensor] = ()) -> None:
        """Move everything to host memory, but for what ``keep`` lies in. What is away stays away."""
        kept = _storages(keep, self._device)
        self._synchronize()  # DeepSpeed copies on streams of its own
        leaving = {key: s for key, s in _storages(self._tensors(), self._device).items() if key not in kept}
        self._away |= {key: _Copy.of(storage, self._device) for key, storage in leaving.items()}
        self._synchronize()  # the copies are whole
        for storage in leaving.values():
            storage.resize_(0)
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # what the engines have read in a weight sync
            torch.cuda.empty_cache()

    def reload(self, only: Iterable[torch.Tensor] | None = None) -> None:
        """Move everything back, or only what these tensors lie in. What is there stays there."""
        for key in list(self._away) if only is None else _keys(only) & self._away.keys():
            self._away[key].restore(self._device)
            del self._away[key]  # not before: memory may have run out
        self._synchronize()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@dataclasses.dataclass(frozen=True, slots=True)
class _Copy:
    """A storage that is away."""

    storage: torch.UntypedStorage
    pieces: list[torch.Tensor]  # on the host, of ``PIECE_BYTES`` each but the last
    num_bytes: int

    @classmethod
    def of(cls, storage: torch.UntypedStorage, device: torch.device) -> _Copy:
        """The copying may go on after this returns."""
        pinned = device.type == "cuda"
        pieces = [
            torch.empty(len(piece), dtype=torch.uint8, pin_memory=pinned).copy_(piece, non_blocking=True)
            for piece in _bytes_of(storage, device).split(PIECE_BYTES)
        ]
        return cls(storage, pieces, storage.nbytes())

    def restore(self, device: torch.device) -> None:
        """As it was; the copying may go on after this returns."""
        self.storage.resize_(self.num_bytes)
        places = _bytes_of(self.storage, device).split(PIECE_BYTES)
        for place, piece in zip(places, self.pieces, strict=True):
            place.copy_(piece, non_blocking=True)


def module_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, under ZeRO-3 this rank's shards of them too, and buffers."""
    for parameter in module.parameters():
        yield parameter.data
        if hasattr(parameter, "ds_tensor"):
            yield parameter.ds_tensor
        if getattr(parameter, "ds_secondary_tensor", None) is not None:  # of hpZ
            yield parameter.ds_secondary_tensor
    yield from module.buffers()


def engine_tensors(engine: Any) -> Iterator[torch.Tensor]:
    """All that a model under DeepSpeed holds: those of the module, gradients, master weights, optimizer states, buckets."""
    yield from module_tensors(engine.module)
    yield from _within([list(engine.module.parameters())])
    yield from _within([vars(engine.optimizer), vars(inner_optimizer(engine.optimizer))])


def _within(roots: list[Any]) -> Iterator[torch.Tensor]:
    """Tensors in containers of containers, and their gradients."""
    seen: dict[int, Any] = {}
    rest = list(roots)
    while rest:
        thing = rest.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        if isinstance(thing, torch.Tensor):
            yield thing
            rest += [thing.grad, getattr(thing, "grad_accum", None)]  # the latter is DeepSpeed's
        elif isinstance(thing, dict):
            rest += thing.values()
        elif isinstance(thing, (list, tuple, set)):
            rest += thing
        elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
            rest += [getattr(thing, field.name) for field in dataclasses.fields(thing)]


def _keys(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Of their storages, wherever they are."""
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _storages(tensors: Iterable[torch.Tensor], device: torch.device) -> dict[int, torch.UntypedStorage]:
    """Those below the tensors that lie on the device, each once; not those that are away, nor those that are somebody else's:
    a mapped file, an array of numpy's."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.device.type == device.type and storage.nbytes() and storage.resizable():
            found[storage._cdata] = storage
    return found


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
