"""An image from wherever a dataset or an environment has it.

::

    "shots/1.png"  "file:///…"     a file
    "https://…"                    downloaded, within limits of size and time
    "data:image/png;base64,…"      in the text itself; the bare base64 too, and bytes
    {"bytes": …, "path": …}        as Hugging Face datasets have it, decoded or not
    {"url": …}                     as the OpenAI API has it
    a PIL image

Its pixels are unpacked only after a look at its size, so that a small file cannot fill the memory.
"""

from __future__ import annotations

import base64
import binascii
import io
import ipaddress
import re
import socket
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from rlhf_core.errors import DataError
from rlhf_core.vision.canonical import UNREADABLE, canonical

if TYPE_CHECKING:
    from PIL.Image import Image

    from rlhf_core.vision.canonical import CanonicalImage

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")  # none that runs another program, as EPS does
MAX_REDIRECTS = 3
DATA_URL = re.compile(r"data:(?P<type>[^,]*?)(?P<base64>;base64)?,(?P<body>.*)", re.DOTALL)
SHOWN = 80  # characters of a source in an error


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What one image may cost."""

    max_bytes: int = 32 * 2**20  # of a file or a download
    max_pixels: int = 64 * 2**20  # width times height
    timeout: float = 30.0  # seconds a download may take, redirects included
    # Hosts that may be asked though their address is not a public one; None: any address may be asked.
    private_hosts: tuple[str, ...] | None = None


def read_image(source: Any, limits: ImageLimits, place: str) -> CanonicalImage:
    """The canonical form of an image.

    Args:
        source: see the top of this module.
        limits: what it may cost.
        place: where it was named, for errors: "train.jsonl, row 3".

    Raises:
        DataError: it cannot be had, is no image, or is over a limit. The message names the place and the source.
    """
    return from_pil(source, limits, place) if _is_pil(source) else decode(*fetch(source, limits, place), limits)


def from_pil(source: Image, limits: ImageLimits, place: str) -> CanonicalImage:
    """The canonical form of a PIL image."""
    where = f"{place}: the image {getattr(source, 'filename', '') or 'given as PIL'}"
    _check_pixels(source.size, limits, where)
    return canonical(source, where)


def fetch(source: Any, limits: ImageLimits, place: str) -> tuple[bytes, str]:
    """The bytes of an image's file, and what to call it in an error; errors as ``read_image``."""
    where = f"{place}: the image {named(source)}"
    try:
        data = _bytes_of(source, limits, where)
    except OSError as error:
        raise DataError(f"{where} cannot be read: {error}; restore it, or correct the row") from error
    if len(data) > limits.max_bytes:
        raise _too_large(where, len(data), limits)
    return data, where


def decode(data: bytes, where: str, limits: ImageLimits) -> CanonicalImage:
    """The canonical form of an image's file; errors as ``read_image``."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is checked below
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:  # Pillow's own limit, beyond any of ours
        raise DataError(f"{where} is too large: {error} Scale it down") from error
    except UNREADABLE as error:
        raise DataError(f"{where} is no image of the formats {', '.join(FORMATS)}: {error}; replace it") from error
    with image:
        _check_pixels(image.size, limits, where)
        return canonical(image, where)


def named(source: Any) -> str:
    """What to call a source in an error: short, without a password or key in its URL."""
    if isinstance(source, dict):
        inner = source.get("url") or source.get("path")
        return named(inner) if inner else f"of {len(source.get('bytes') or b'')} bytes"
    if isinstance(source, bytes | bytearray | memoryview):
        return f"of {len(source)} bytes"
    if not isinstance(source, str):
        return f"given as {type(source).__name__}"
    if source.startswith(("http://", "https://")):
        try:
            parts = urlsplit(source)
        except ValueError:  # no URL at all; what of it is a password cannot be known
            return f"of a URL that cannot be read, of {len(source)} characters"
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return (
        source if len(source) <= SHOWN else f"{source[: SHOWN // 2]}…{source[-SHOWN // 2 :]}"
    )  # a path says more at its end


def is_file(source: Any) -> Path | None:
    """The file of this machine that the source names; None if it is another kind of source."""
    if isinstance(source, dict) and not source.get("bytes"):
        return is_file(source.get("url") or source.get("path"))
    if not isinstance(source, str) or source.startswith(("http://", "https://", "data:")):
        return None
    path = Path(unquote(source.removeprefix("file://"))) if source.startswith("file://") else Path(source)
    try:
        return path if path.is_file() else None
    except (OSError, ValueError):  # too long, or with a NUL: it is base64, or nothing
        return None


def _is_pil(source: Any) -> bool:
    from PIL import Image

    return isinstance(source, Image.Image)


def _bytes_of(source: Any, limits: ImageLimits, where: str) -> bytes:
    if isinstance(source, dict) and source.get("bytes"):
        source = source["bytes"]
    elif isinstance(source, dict):
        source = source.get("url") or source.get("path")
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if not isinstance(source, str) or not source:
        raise DataError(
            f"{where}: it is a {type(source).__name__}: give a path, a URL, bytes, base64, a PIL image, or a dict with "
            "'bytes', 'path' or 'url'"
        )
    if source.startswith(("http://", "https://")):
        return _download(source, limits, where)
    if source.startswith("data:"):
        return _from_data_url(source, where)
    path = is_file(source)
    if path is not None:
        size = path.stat().st_size
        if size > limits.max_bytes:
            raise _too_large(where, size, limits)
        return path.read_bytes()
    decoded = _from_base64(source)
    if decoded is None:
        raise DataError(
            f"{where}: there is no such file (paths are relative to {Path.cwd()}), and it is no URL or base64"
        )
    return decoded


def _from_data_url(source: str, where: str) -> bytes:
    found = DATA_URL.fullmatch(source)
    if found is None:
        raise DataError(f"{where} is no data URL: write data:image/png;base64,…")
    if not found["base64"]:
        return unquote_to_bytes(found["body"])
    decoded = _from_base64(found["body"], least=1)
    if decoded is None:
        raise DataError(f"{where}: what follows 'base64,' is not base64: encode it again")
    return decoded


def _from_base64(text: str, least: int = 40) -> bytes | None:
    """None for what is no base64, or too short to be an image's: a path can look like it."""
    if len(text) < least:
        return None
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        return None


def _download(url: str, limits: ImageLimits, where: str) -> bytes:
    import httpx

    def check(request: httpx.Request) -> None:
        _check_host(request.url.host, limits, where)

    start = time.monotonic()
    data = bytearray()
    try:
        with (
            httpx.Client(
                follow_redirects=True,
                max_redirects=MAX_REDIRECTS,
                timeout=limits.timeout,
                event_hooks={"request": [check]},  # of redirects too
            ) as client,
            client.stream("GET", url, headers={"Accept-Encoding": "identity"}) as answer,
        ):
            answer.raise_for_status()
            for chunk in answer.iter_bytes():
                data += chunk
                if len(data) > limits.max_bytes:
                    raise _too_large(where, len(data), limits)
                if time.monotonic() - start > limits.timeout:
                    raise DataError(f"{where} was not there after {limits.timeout:g} seconds: raise data.image_timeout")
    except httpx.TimeoutException as error:
        raise DataError(f"{where} did not answer in {limits.timeout:g} seconds: raise data.image_timeout") from error
    except httpx.HTTPStatusError as error:
        raise DataError(f"{where}: its server answers {error.response.status_code}; correct the URL") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DataError(f"{where} cannot be downloaded: {type(error).__name__}: {error}") from error
    return bytes(data)


def _check_host(host: str, limits: ImageLimits, where: str) -> None:
    """What names the source may be a text that the policy wrote: it must not reach what only this machine can reach.

    The name is looked up again for the connection itself: this is no defence against a hostile name server.
    """
    if limits.private_hosts is None or host in limits.private_hosts:
        return
    try:
        found = {str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise DataError(f"{where}: the host {host!r} is not known: {error}") from error
    for text in sorted(found):
        address = ipaddress.ip_address(text)
        address = getattr(address, "ipv4_mapped", None) or address
        if not address.is_global or address.is_multicast:
            raise DataError(
                f"{where} would be fetched from {host!r}, whose address {text} is not a public one: send it as data: URL, or "
                "name the host in agent.server.image_hosts"
            )


def _check_pixels(size: tuple[int, int], limits: ImageLimits, where: str) -> None:
    if size[0] * size[1] > limits.max_pixels:
        raise DataError(
            f"{where} has {size[0]} x {size[1]} pixels, more than {limits.max_pixels}: scale it down, or raise "
            "data.image_max_pixels"
        )


def _too_large(where: str, size: int, limits: ImageLimits) -> DataError:
    return DataError(
        f"{where} has {size} bytes or more, over the limit of {limits.max_bytes}: make it smaller, or raise "
        "data.image_max_bytes"
    )
