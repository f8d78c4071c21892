"""Requests that show images, as vLLM takes them.

::

    expanded ids + ImageRefs ─▶ collapse: one placeholder an image ─┐
                     └─ load ─▶ PIL ────────────────────────────────┴─▶ vLLM's renderer ─▶ expanded ids, pixel values
                                                                            └── must be the ids of the request

vLLM expands placeholders itself, and would expand the first one of an expanded run again without a word. So it is given the
collapsed ids, and what it makes of them is compared with the request: those are the ids that will be trained on.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import ConfigError, DataError, GenerationError, StorageError
from rlhf_core.vision import VisionProcessor

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlhf_core.generation.settings import EngineSettings
    from rlhf_core.records import GenerateRequest, ImageRef
    from rlhf_core.vision import CanonicalImage

    ImageLoader = Callable[[ImageRef], CanonicalImage]


class EngineImages:
    """The image side of one engine.

    Args:
        processor: of the model.
        load: an image by its reference, verified; called in threads.
        llm: vLLM's AsyncLLM.

    Raises:
        ConfigError: vLLM would make other pixel values than the trainer.
    """

    def __init__(self, processor: VisionProcessor, load: ImageLoader, llm: Any) -> None:
        _check_same_processor(processor, llm)
        self.processor, self._renderer = processor, llm.renderer
        # vLLM's two processes each keep pixel values, and the sending one leaves out what it believes the other has. We empty
        # the other's before each batch, so the sender's is replaced by the one vLLM has for requests that are never sent.
        llm.renderer._mm_processor_cache = llm.renderer._mm_processor_only_cache
        self._load = load

    @classmethod
    def of(cls, settings: EngineSettings, load: ImageLoader | None, llm: Any) -> EngineImages:
        """The one of a started engine.

        Raises:
            ConfigError: the model reads text only, or as above.
        """
        model = settings.model
        processor = VisionProcessor.load_seeing(model, settings.trust_remote_code, settings.max_images, repr(model))
        if load is None:
            raise TypeError("an engine that reads images needs a way to load them")
        return cls(processor, load, llm)

    @property
    def placeholder_ids(self) -> frozenset[int]:
        """Tokens that must never be sampled: they would be taken for images."""
        return self.processor.placeholder_ids

    async def engine_input(self, request: GenerateRequest) -> dict[str, Any]:
        """What ``input_processor.process_inputs`` takes.

        Raises:
            GenerationError: an image cannot be read; or vLLM and the request do not agree on the tokens.
        """
        ids = self.processor.collapse(request.prompt_token_ids, [(image.start, image.end) for image in request.images])
        placeholders = ids.count(self.processor.image_token_id)
        if placeholders != len(request.images):
            raise GenerationError(
                f"request {request.request_id}: {len(request.images)} images, and {placeholders} image tokens outside or in "
                "place of them: a text that shows no image must not hold the model's image token"
            )
        if not request.images:
            return {"type": "token", "prompt_token_ids": request.prompt_token_ids}
        try:
            loaded = [await asyncio.to_thread(self._load, image) for image in request.images]
        except (StorageError, DataError) as error:
            raise GenerationError(f"request {request.request_id}: {error}") from error
        prompt = {
            "prompt_token_ids": ids,
            "multi_modal_data": {"image": [image.to_pil() for image in loaded]},
            # Of the canonical pixels: spares vLLM a digest of its own.
            "multi_modal_uuids": {"image": [image.sha256 for image in request.images]},
        }
        made: dict[str, Any] = await self._renderer.process_for_engine_async(prompt, time.time())
        if list(made["prompt_token_ids"]) != list(request.prompt_token_ids):
            raise GenerationError(
                f"request {request.request_id}: the prompt has {len(request.prompt_token_ids)} tokens, vLLM makes "
                f"{len(made['prompt_token_ids'])} of it and its {len(request.images)} images: the ids were made with another "
                "image processor, or hold image tokens of no image"
            )
        return made


def _check_same_processor(processor: VisionProcessor, llm: Any) -> None:
    """vLLM loads an image processor of its own; another class or other settings make other pixel values."""
    theirs = llm.renderer.get_mm_processor().info.get_hf_processor().image_processor
    found, expected = f"{type(theirs).__module__}.{type(theirs).__qualname__}", processor.description["image_processor"]
    if found != expected:
        raise ConfigError(
            f"vLLM reads images with {found}, the trainer with {expected}: they make other pixel values; install the same "
            "packages (torchvision, or none) everywhere"
        )
