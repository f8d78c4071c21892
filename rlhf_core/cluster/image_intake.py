"""The images of a run on their way in: those of prompts, and those that environments show.

::

    bytes ─ decode ─▶ canonical ─┬─ keep ─▶ images/… in the run's storage, once
                                 └─ VisionProcessor.tokenise ─▶ ids with room for it, ImageRef
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rlhf_core.config.differences import differences
from rlhf_core.data.images import image_limits
from rlhf_core.errors import ConfigError
from rlhf_core.records import ImageRef
from rlhf_core.vision import VisionProcessor
from rlhf_core.vision.sources import read_image

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rlhf_core.config import Config
    from rlhf_core.storage import RunStore
    from rlhf_core.vision import CanonicalImage
    from rlhf_core.vision.sources import ImageLimits

FEEDBACK = "environment feedback"


def check_image_processor(store: RunStore, processor: VisionProcessor | None) -> None:
    """Refuse another image processor than the one the run began with (run.json): rows would no longer show what they showed.

    Of a run that has not begun, or shows no images, there is nothing to compare.

    Raises:
        ConfigError: it is another one; the message says where they differ.
    """
    if processor is None:
        return
    recorded = (store.read_run() or {}).get("vision")
    if recorded is None or recorded == processor.description:
        return
    changed = differences(recorded, processor.description)
    listed = "; ".join(f"{key}: {old!r}, here {new!r}" for key, (old, new) in sorted(changed.items()))
    raise ConfigError(
        f"{store.url} began with another image processor ({listed}): the same images would have other pixel values. Install "
        "what it began with, or start a new run"
    )


class RunImages:
    """``ImageIntake`` and ``ImageKeeper`` of a run. May be used from several threads.

    Args:
        store: of the run.
        processor: of its policy.
        limits: what one image may cost.
    """

    def __init__(self, store: RunStore, processor: VisionProcessor, limits: ImageLimits) -> None:
        self._store = store
        self.processor = processor
        self._limits = limits
        self._kept: dict[str, str] = {}  # sha256 of the pixels -> path

    @classmethod
    def of(cls, config: Config, model_path: str, store: RunStore) -> RunImages | None:
        """Those of a run; None if it shows no images.

        Raises:
            ConfigError: the policy reads text only, or its image processor does not load.
        """
        most = config.data.max_images_per_prompt
        if most == 0:
            return None
        named = f"actor.model_name_or_path={config.actor.model_name_or_path!r}"
        processor = VisionProcessor.load_seeing(model_path, config.run.trust_remote_code, most, named)
        check_image_processor(store, processor)
        return cls(store, processor, image_limits(config.data))

    @property
    def placeholder(self) -> str:
        """See ``agents.episode.ImageIntake``."""
        return self.processor.placeholder

    def keep(self, sha256: str, read: Callable[[], CanonicalImage]) -> str:
        """Make an image durable, once; returns its path in the run. ``read`` is called unless it is durable already."""
        if sha256 not in self._kept:
            self._kept[sha256] = self._store.put_image(read().to_png())
        return self._kept[sha256]

    async def tokenise(self, text: str, images: Sequence[bytes]) -> tuple[list[int], tuple[ImageRef, ...]]:
        """See ``agents.episode.ImageIntake``. Without images, what reads like a placeholder stays text."""
        return await asyncio.to_thread(self._take_in, text, images)

    def _take_in(self, text: str, images: Sequence[bytes]) -> tuple[list[int], tuple[ImageRef, ...]]:
        shown = [read_image(image, self._limits, f"{FEEDBACK}, image {i}") for i, image in enumerate(images)]
        whole = text if shown else self.processor.literal(text)
        token_ids, spans = self.processor.tokenise(whole, shown, FEEDBACK)
        paths = [self.keep(image.sha256, lambda image=image: image) for image in shown]  # type: ignore[misc]
        refs = (ImageRef(image.sha256, path, *span) for image, path, span in zip(shown, paths, spans, strict=True))
        return token_ids, tuple(refs)
