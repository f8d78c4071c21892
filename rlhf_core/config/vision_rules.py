"""Rules for images: what reads text only is not given any."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rlhf_core.config.model import Config


def images_are_seen(config: Config) -> Iterator[str]:
    """Every model of the run that reads the prompts reads their images, row by row, or the run is refused."""
    shown = f"data.max_images_per_prompt={config.data.max_images_per_prompt}"
    if config.data.max_images_per_prompt == 0:
        if config.actor.freeze_visual_encoder:
            yield "actor.freeze_visual_encoder freezes what a run without images never uses: set data.max_images_per_prompt"
        return
    if config.ds.packing_samples:
        yield (
            f"{shown}, but ds.packing_samples packs text only (pixel values and the positions of image tokens belong to rows): "
            "remove ds.packing_samples"
        )
    if config.reward.model_name_or_path is not None:
        yield (
            f"{shown}, but a trained reward model reads text only: remove reward.model_name_or_path, and use reward.functions "
            "or a server of your own in reward.remote_url"
        )


VISION_RULES: tuple[Callable[[Config], Iterator[str]], ...] = (images_are_seen,)
