"""The images of prompts: looked at once at the start, read again and stored when a prompt that shows them is drawn.

::

    start  source ─ read_image ─▶ sha256, width, height, and where its file can be read again     (PromptImage)
    draw   PromptImage ─ again ─▶ pixels, the same as at the start ─ keep ─▶ the run's storage, once

What is kept of an image meanwhile is a few numbers. A file stays where it is; what came with the row or was downloaded waits in
one temporary file, which has no name and goes with the process.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from rlhf_core.errors import DataError
from rlhf_core.vision.sources import ImageLimits, decode, fetch, from_pil, is_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rlhf_core.config.model import DataConfig
    from rlhf_core.vision import CanonicalImage


class ImageKeeper(Protocol):
    """Where a run keeps its images."""

    def keep(self, sha256: str, read: Callable[[], CanonicalImage]) -> str:
        """Make an image durable, and return its ``ImageRef.uri``; ``read`` is called unless it is durable already."""
        ...


@dataclass(frozen=True, slots=True)
class Waiting:
    """A place in the temporary file."""

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class PromptImage:
    """What is kept of an image until its prompt is drawn."""

    sha256: str  # of its canonical pixels
    size: tuple[int, int]  # (width, height)
    origin: Path | Waiting
    where: str  # for errors


class PromptImages:
    """The images of the prompts of one process. May be used from several threads."""

    def __init__(self, limits: ImageLimits) -> None:
        self._limits = limits
        self._lock = Lock()
        self._file = tempfile.TemporaryFile(prefix="rlhf-images-")  # noqa: SIM115  it goes with this object
        self._end = 0
        self._waiting: dict[str, Waiting] = {}  # sha256 -> place: of images of many rows one is kept

    def look(self, source: Any, place: str) -> PromptImage:
        """Read an image, and keep what it takes to read it again.

        Raises:
            DataError: as ``vision.sources.read_image``.
        """
        if _is_pil(source):
            image, where = from_pil(source, self._limits, place), f"{place}: its image"
            return PromptImage(image.sha256, image.size, self._wait(image.sha256, image.to_png), where)
        data, where = fetch(source, self._limits, place)
        image = decode(data, where, self._limits)
        path = is_file(source)
        origin = path.absolute() if path is not None else self._wait(image.sha256, lambda: data)
        return PromptImage(image.sha256, image.size, origin, where)

    def again(self, image: PromptImage) -> CanonicalImage:
        """The image that ``look`` saw.

        Raises:
            DataError: it is gone, or is another one by now.
        """
        origin = image.origin
        if isinstance(origin, Waiting):
            data = os.pread(self._file.fileno(), origin.length, origin.start)
        else:
            data, _ = fetch(str(origin), self._limits, image.where)
        found = decode(data, image.where, self._limits)
        if found.sha256 != image.sha256:
            raise DataError(f"{image.where} is not the one that was there when this process started: restore it")
        return found

    def _wait(self, sha256: str, make: Callable[[], bytes]) -> Waiting:
        with self._lock:
            if sha256 not in self._waiting:
                data = make()
                _write_all(self._file.fileno(), data, self._end)
                self._waiting[sha256] = Waiting(self._end, len(data))
                self._end += len(data)
            return self._waiting[sha256]

    def __del__(self) -> None:
        with suppress(OSError, AttributeError):
            self._file.close()


def image_limits(data: DataConfig) -> ImageLimits:
    """What one image may cost, by the configuration."""
    return ImageLimits(data.image_max_bytes, data.image_max_pixels, data.image_timeout)


def _write_all(descriptor: int, data: bytes, start: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, start)
        view, start = view[written:], start + written


def _is_pil(source: Any) -> bool:
    from PIL import Image

    return isinstance(source, Image.Image)
