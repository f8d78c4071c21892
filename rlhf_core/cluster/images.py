"""Where the processes of a run find the images that its rows show."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from rlhf_core.vision import from_png

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlhf_core.records import ImageRef
    from rlhf_core.storage import RunStore
    from rlhf_core.vision import CanonicalImage

KEPT_IMAGES = 64  # decoded, in each process: the samples of a group, and the turns of an episode, show the same ones


def image_loader(store: RunStore) -> Callable[[ImageRef], CanonicalImage]:
    """A function that reads an image from the log of a run, and proves that it is the one that is named.

    It raises ``CorruptShardError`` where the image is missing or another one. It may be called in threads.
    """

    @lru_cache(KEPT_IMAGES)
    def read(uri: str, sha256: str) -> CanonicalImage:
        return from_png(store.get_image(uri), sha256, store.url_of(uri))

    return lambda image: read(image.uri, image.sha256)
