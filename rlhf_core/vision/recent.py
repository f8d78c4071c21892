"""Pixel values of the images that were asked for last: the rows of a group, and the passes over them, show the same ones."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Features = dict[str, torch.Tensor]

KEPT_BYTES = 256 * 2**20


class RecentFeatures:
    """sha256 of an image to what the image processor made of it; the oldest go first. May be used from several threads."""

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        self._most, self._bytes = most_bytes, 0
        self._kept: OrderedDict[str, Features] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, sha256: str) -> Features | None:
        """Read it only: others get the same tensors."""
        with self._lock:
            if sha256 in self._kept:
                self._kept.move_to_end(sha256)
            return self._kept.get(sha256)

    def put(self, sha256: str, features: Features) -> None:
        """Keep them while there is room."""
        with self._lock:
            if sha256 in self._kept:
                return
            self._kept[sha256] = features
            self._bytes += _size(features)
            while self._bytes > self._most and self._kept:
                self._bytes -= _size(self._kept.popitem(last=False)[1])


def _size(features: Features) -> int:
    return sum(tensor.nbytes for tensor in features.values())
