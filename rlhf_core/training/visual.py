"""The image side of a model that scores or learns: its class, its frozen part, and the pixels of each batch.

::

    rows ─ collate ─▶ TokenBatch ─┐
      └─ images ─ load ─▶ pixels ─┴─ VisionProcessor ─▶ TokenBatch with ImageInputs ─▶ TokenScorer

A rank whose micro-batch shows no image would leave out the vision tower, while the others gather its parameters (ZeRO-3) or
sum its gradients with theirs (ZeRO-1, 2): they would wait for ever, or add what does not belong together. So such a batch gets
one more row, a blank image that nobody asks about: it adds a gradient of 0 to every parameter of the tower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
from transformers import AutoModelForImageTextToText

from rlhf_core.batching import ImageInputs, collate_experiences, collate_tokens
from rlhf_core.errors import TrainingError
from rlhf_core.training.loading import (
    is_vision_language_only,
    load_causal_lm,
    load_model_config,
    load_weights,
    refuse_missing,
)
from rlhf_core.vision import VisionProcessor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn
    from transformers import PreTrainedModel

    from rlhf_core.batching import ExperienceBatch, ImageRow, TokenBatch
    from rlhf_core.config import Config
    from rlhf_core.records import Experience, ImageRef
    from rlhf_core.training.loading import LoadSettings
    from rlhf_core.vision import CanonicalImage

    ImageLoader = Callable[[ImageRef], CanonicalImage]

RowT = TypeVar("RowT")

VISION_LANGUAGE = "vision-language model"


def load_policy_model(settings: LoadSettings, path: str, reads_images: bool) -> PreTrainedModel:
    """A language model in host memory, without dropout; with its vision tower if it is to read images, or has no other form.

    Raises:
        TrainingError: the folder or id cannot be loaded as one, or lacks some of its weights.
    """
    model_config = load_model_config(settings, path, VISION_LANGUAGE if reads_images else "language model")
    if not reads_images and not is_vision_language_only(model_config):
        return load_causal_lm(settings, path)
    model, missing = load_weights(
        AutoModelForImageTextToText, settings, path, VISION_LANGUAGE, model_config, in_4bit=settings.ds.load_in_4bit
    )
    refuse_missing(missing, path, VISION_LANGUAGE)
    return model


def visual_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Name to parameter of vision tower and connector: all that is neither of the language model nor of the output layer.

    Raises:
        TrainingError: there are none.
    """
    backbone = model.base_model  # a classifier has a head behind it, which is no output layer
    spoken = {
        id(parameter)
        for part in (backbone.get_decoder(), model.get_output_embeddings())
        if part is not None
        for parameter in part.parameters()
    }
    read = {id(parameter) for parameter in backbone.parameters()} - spoken
    found = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in read}
    if not found:
        raise TrainingError(f"{type(model).__name__} has no vision tower: remove actor.freeze_visual_encoder")
    return found


def freeze_visual_encoder(model: PreTrainedModel) -> None:
    """Vision tower and connector stay as they are: no gradient, no optimizer state; they are synced and saved like the rest."""
    for parameter in visual_parameters(model).values():
        parameter.requires_grad_(False)


def eyes_learn(config: Config) -> bool:
    """The vision towers of policy and critic have gradients: they are not frozen, by name or under adapters."""
    return not config.actor.freeze_visual_encoder and config.ds.lora.rank == 0


class ImageReader:
    """Makes batches of rows that may show images. It may be asked from another thread than the one that trains.

    Args:
        processor: of the model.
        load: an image by its reference, verified.
        blank_rows: give every batch an image: see the module.
    """

    def __init__(self, processor: VisionProcessor, load: ImageLoader, blank_rows: bool) -> None:
        self.processor, self._load, self._blank_rows = processor, load, blank_rows

    @classmethod
    def of(cls, config: Config, model_path: str, load: ImageLoader | None, learns: bool) -> ImageReader | None:
        """The one of a model of the run; None if the run shows no images.

        Args:
            config: the run's.
            model_path: the folder or id of the model.
            load: an image by its reference.
            learns: the vision tower has gradients.

        Raises:
            ConfigError: the model reads text only, or its image processor does not load.
        """
        most = config.data.max_images_per_prompt
        if most == 0:
            return None
        processor = VisionProcessor.load_seeing(model_path, config.run.trust_remote_code, most, repr(model_path))
        if load is None:
            raise TypeError("a run that shows images needs a way to load them")
        return cls(processor, load, blank_rows=learns or config.ds.zero_stage == 3)

    @property
    def placeholder_ids(self) -> frozenset[int]:
        """Tokens that the engine never samples."""
        return self.processor.placeholder_ids

    def tokens(self, rows: Sequence[ImageRow]) -> TokenBatch:
        """``collate_tokens`` with what the rows show.

        Raises:
            DataError: a row's image tokens are not those of its images.
            CorruptShardError: an image is missing or damaged.
        """
        batch = collate_tokens(rows)
        return batch.with_images(self._inputs(rows, batch.input_ids_BT))

    def experiences(self, rows: Sequence[Experience]) -> ExperienceBatch:
        """``collate_experiences`` with what the rows show; errors as ``tokens``."""
        batch = collate_experiences(rows)
        return batch.with_images(self._inputs(rows, batch.tokens.input_ids_BT))

    def _inputs(self, rows: Sequence[ImageRow], input_ids_BT: torch.Tensor) -> ImageInputs:
        shown = [[self._load(image) for image in row.images] for row in rows]
        if any(shown) or not self._blank_rows:
            return ImageInputs(self.processor.model_inputs(shown, input_ids_BT))
        blank = self.processor.blank
        blank_T = torch.tensor(blank.token_ids, dtype=torch.int64)
        longer = ImageInputs({}, blank_T).add_blank_row(input_ids_BT)
        return ImageInputs(self.processor.model_inputs(shown, longer, blank), blank_T)
