"""One form of every image: what the engine sees, what is stored, and what the trainer makes its pixel values from.

::

    any PIL image ─ turned upright, alpha over white, RGB ─▶ CanonicalImage(sha256, width, height, pixels) ⇄ PNG, bit by bit

An image is named by its pixels, not by its file: the same picture as PNG, as BMP, or with other metadata is one image.
"""

from __future__ import annotations

import hashlib
import io
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_core.errors import CorruptShardError, DataError

if TYPE_CHECKING:
    from PIL.Image import Image

PNG_LEVEL = 1  # of zlib: a fifth of the time of level 9, for a few per cent more bytes
DEEP = (
    "I",
    "F",
)  # how modes of more than 8 bits a channel begin: which 256 of their values to keep is not ours to choose

# What Pillow's decoders raise for broken files. Not only its own errors: the AVIF decoder RuntimeError, its timing of frames
# ZeroDivisionError, the reader of EXIF struct.error and TypeError.
UNREADABLE = (
    OSError, ValueError, SyntaxError, EOFError, RuntimeError, ArithmeticError, TypeError, LookupError, struct.error,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CanonicalImage:
    """RGB pixels, and what names them."""

    sha256: str  # hex, of the size and the pixels
    width: int
    height: int
    pixels: bytes  # [height * width * 3] rows from the top, red, green, blue

    @property
    def size(self) -> tuple[int, int]:
        """(width, height), as PIL says it."""
        return self.width, self.height

    def to_pil(self) -> Image:
        """As a PIL image."""
        from PIL import Image

        return Image.frombytes("RGB", self.size, self.pixels)

    def to_png(self) -> bytes:
        """As a PNG file without any metadata."""
        file = io.BytesIO()
        self.to_pil().save(file, "PNG", compress_level=PNG_LEVEL)
        return file.getvalue()


def canonical(image: Image, place: str = "the image") -> CanonicalImage:
    """The canonical form of a PIL image.

    Args:
        image: Any mode and orientation. Its pixels are read here, where they were not yet.
        place: What to call it in an error.

    Raises:
        DataError: Its pixels cannot be read, or have more than 8 bits a channel.
    """
    from PIL import Image, ImageOps

    if image.mode.startswith(DEEP):
        raise DataError(
            f"{place}: its mode {image.mode!r} has more than 8 bits a channel: convert it to RGB or L yourself"
        )
    try:
        upright = ImageOps.exif_transpose(image)
        if upright.has_transparency_data:
            layer = upright.convert("RGBA")
            upright = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
        rgb = upright.convert("RGB")
        pixels = rgb.tobytes()
    except UNREADABLE as error:
        raise DataError(f"{place}: its pixels cannot be read: {error}; replace the image") from error
    return CanonicalImage(_digest(*rgb.size, pixels), *rgb.size, pixels)


def from_png(data: bytes, sha256: str, place: str) -> CanonicalImage:
    """A stored image.

    Args:
        data: Of the PNG.
        sha256: What names its pixels.
        place: Where it lies, for errors.

    Raises:
        CorruptShardError: It is no such image.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=("PNG",)) as file:
            if file.mode != "RGB":
                raise CorruptShardError(f"{place} is damaged: its pixels are {file.mode}, stored was RGB")
            width, height = file.size
            pixels = file.tobytes()
    except CorruptShardError:
        raise
    except (*UNREADABLE, Image.DecompressionBombError) as error:
        raise CorruptShardError(f"{place} is no whole PNG: {error}") from error
    found = _digest(width, height, pixels)
    if found != sha256:
        raise CorruptShardError(f"{place} is damaged: the sha256 of its pixels is {found}, recorded was {sha256}")
    return CanonicalImage(sha256, width, height, pixels)


def _digest(width: int, height: int, pixels: bytes) -> str:
    digest = hashlib.sha256(f"{width}x{height}:".encode())
    digest.update(pixels)
    return digest.hexdigest()
