"""Images of messages: fetched within limits, made canonical before vLLM sees them, and stored for the trainer.

::

    {"type": "image_url", ...} ─fetch─▶ PIL ─canonical─▶ PNG ─store─▶ uri
                                            └──────────▶ {"type": "image_pil", ..., "uuid": sha256}   what vLLM renders
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.agents.sessions.refusal import malformed
from rlhf_core.errors import DataError
from rlhf_core.vision.sources import read_image

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rlhf_core.vision import CanonicalImage
    from rlhf_core.vision.sources import ImageLimits

IMAGE_PARTS = ("image_url", "input_image")
URLS = ("data:", "http://", "https://")  # never a path: files of this machine are not the client's to see
FETCHES = 8  # at once
REMEMBERED = 4096  # images known to be stored: 200 bytes each


class Picture(NamedTuple):
    """An image of a prompt, stored."""

    sha256: str
    uri: str


class Pictures:
    """Takes images in.

    Args:
        model_config: vLLM's.
        store: makes a PNG durable, once, and returns its path; called in threads; None: not possible.
        limits: what one image may cost, and where it may lie.
    """

    def __init__(self, model_config: Any, store: Callable[[bytes], str] | None, limits: ImageLimits) -> None:
        self._sees = bool(model_config.is_multimodal_model)
        self._store = store
        self._limits = limits
        self._threads = ThreadPoolExecutor(FETCHES, "images")  # a slow server must not hold up what else needs threads
        self._stored: OrderedDict[str, str] = OrderedDict()  # sha256 -> uri

    async def take_in(self, messages: Sequence[Any]) -> list[Picture]:
        """Replace the images of the messages, in place; returns them in order. A text model's are left to vLLM's error.

        Raises:
            CallRefusedError: an image cannot be had, or the run stores none.
        """
        if not self._sees:
            return []
        parts = [part for message in messages for part in _parts(message)]
        return [await self._take(part) for part in parts if part.get("type") in IMAGE_PARTS]

    async def _take(self, part: dict[str, Any]) -> Picture:
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, dict) else url
        if not isinstance(url, str) or not url.startswith(URLS):
            raise malformed("an image needs its data: or http(s): URL")
        if self._store is None:
            raise malformed("images cannot be kept here: set data.max_images_per_prompt to 1 or more")
        image = await self._fetch(url)
        picture = Picture(image.sha256, await self._stored_at(image, self._store))
        part.clear()
        pixels = await asyncio.to_thread(image.to_pil)
        part.update(type="image_pil", image_pil=pixels, uuid=picture.sha256)
        return picture

    async def _fetch(self, url: str) -> CanonicalImage:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, read_image, url, self._limits, "a message")
        except DataError as error:
            raise malformed(str(error)) from error
        except Exception as error:  # the client's file: whatever Pillow says about it
            raise malformed(f"an image cannot be read: {error}") from error

    async def _stored_at(self, image: CanonicalImage, store: Callable[[bytes], str]) -> str:
        uri = self._stored.get(image.sha256)
        if uri is None:
            uri = await asyncio.to_thread(lambda: store(image.to_png()))
            self._stored[image.sha256] = uri
            if len(self._stored) > REMEMBERED:
                self._stored.popitem(last=False)
        return uri


def _parts(message: Any) -> list[dict[str, Any]]:
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return []
    return [part for part in content if isinstance(part, dict)]
