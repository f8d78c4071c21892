"""What a vision-language model makes of images: placeholder tokens in a row, and pixel values in a forward pass.

::

    text with one placeholder an image ─ tokenise ─▶ ids in which each image has the room it needs, and where that is
       "<image>What is it?"                            [i i i i i i 40 41 42]    [ImageSpan(0, 6)]
    these ids ─ collapse ─▶ one placeholder an image again: what vLLM is given beside the images, since it expands them itself
    images of a batch ─ model_inputs ─▶ pixel_values, and what else the family's forward pass takes

One image processor serves engine, trainer and this class; its ``fingerprint`` says which. Another backend or version gives
other pixel values for the same image, and log-probs of another model.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.chat_text import LiteralText
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.vision.canonical import CanonicalImage
from rlhf_core.vision.families import FAMILIES, Family
from rlhf_core.vision.recent import RecentFeatures

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from PIL.Image import Image


BLANK_SIZE = (28, 28)  # small, for it is computed for nothing


class ImageSpan(NamedTuple):
    """Tokens ``[start, end)`` of a row that stand for one image."""

    start: int
    end: int


class Tokenised(NamedTuple):
    """Token ids, and where the images are in them."""

    token_ids: list[int]  # [T]
    spans: list[ImageSpan]  # one per image, ascending


class Blank(NamedTuple):
    """An image that nobody asks about, of as few tokens as the model allows."""

    token_ids: list[int]  # [T]
    features: dict[str, torch.Tensor]


class VisionProcessor:
    """The image side of one model. Made by ``load``; may be used from several threads."""

    def __init__(self, family: Family, tokenizer: Any, image_processor: Any, chat_template: str | None) -> None:
        self._family = family
        self._tokenizer = tokenizer
        self._image_processor = image_processor
        self._recent = RecentFeatures()
        self._expansions: dict[tuple[int, int], list[int]] = {}  # (width, height) -> ids
        self.chat_template = chat_template  # the processor's; None: the tokenizer's own is meant
        self.placeholder = family.image_token  # what a chat template writes where an image goes
        self.image_token_id = family.id_of(tokenizer, family.image_token)
        self.placeholder_ids = frozenset(family.known_ids(tokenizer, family.banned_tokens))  # must never be sampled
        self._literal = LiteralText(family.reserved_tokens(tokenizer))

    @classmethod
    def load(cls, model_path: str, trust_remote_code: bool = False) -> VisionProcessor | None:
        """The image side of a model folder or hub id; None if the model reads text only.

        Raises:
            ConfigError: It reads images, and is of a family that was not checked here, or its image processor does not load.
        """
        from transformers import AutoConfig, AutoTokenizer

        try:
            config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise ConfigError(f"no configuration in {model_path!r}: {error}; check actor.model_name_or_path") from error
        if getattr(config, "vision_config", None) is None:
            return None
        make = FAMILIES.get(config.model_type)
        if make is None:
            raise ConfigError(
                f"{model_path!r} is a vision-language model of the type {config.model_type!r}, whose image tokens were not "
                f"checked here: use one of the types {', '.join(FAMILIES)}"
            )
        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        image_processor = _image_processor(model_path, trust_remote_code)
        return cls(make(config, image_processor), tokenizer, image_processor, _chat_template(model_path))

    @classmethod
    def load_seeing(cls, model_path: str, trust_remote_code: bool, max_images: int, named: str) -> VisionProcessor:
        """As ``load``, of a run that shows images.

        Args:
            model_path: A model folder or hub id.
            trust_remote_code: Let its own code run.
            max_images: ``data.max_images_per_prompt``.
            named: The model, for messages.

        Raises:
            ConfigError: The model reads text only; or as ``load``.
        """
        processor = cls.load(model_path, trust_remote_code)
        if processor is None:
            raise ConfigError(
                f"data.max_images_per_prompt={max_images}, but {named} reads text only: name a vision-language model, or set "
                "it to 0"
            )
        return processor

    # --- tokens

    def literal(self, text: str) -> str:
        """``text`` in which every placeholder stays text when it is tokenised, also after a chat template."""
        return self._literal.mark(text)

    def readable(self, text: str) -> str:
        """What ``literal`` was given, or a text that contains it."""
        return self._literal.readable(text)

    def count(self, text: str) -> int:
        """Placeholders in a text, those left out that ``literal`` made text of."""
        return text.count(self.placeholder)

    def tokenise(self, text: str, images: Sequence[CanonicalImage | Image], place: str = "the text") -> Tokenised:
        """Expanded token ids of a text with one placeholder an image, in order. No BOS is added.

        Raises:
            DataError: placeholders and images differ in number, or an image's shape is one the model does not take.
        """
        return self.tokenise_sizes(text, [image.size for image in images], place)

    def tokenise_sizes(self, text: str, sizes: Sequence[tuple[int, int]], place: str = "the text") -> Tokenised:
        """As ``tokenise``, from the (width, height) of each image: its pixels do not matter."""
        pieces = text.split(self.placeholder)
        if len(pieces) - 1 != len(sizes):
            raise DataError(
                f"{place} has {len(pieces) - 1} image placeholders ({self.placeholder}) and {len(sizes)} images: give one for "
                "each, in order"
            )
        token_ids = self._encode(pieces[0])
        spans = []
        for number, (size, piece) in enumerate(zip(sizes, pieces[1:], strict=True)):
            start = len(token_ids)
            token_ids += self.expansion(size, f"{place}, image {number}")
            spans.append(ImageSpan(start, len(token_ids)))
            token_ids += self._encode(piece)
        return Tokenised(token_ids, spans)

    def expansion(self, size: tuple[int, int], place: str = "the image") -> list[int]:
        """The ids that stand for an image of (width, height)."""
        if size not in self._expansions:
            try:
                text = self._family.expansion(size)
            except ValueError as error:  # a shape that the family refuses
                raise DataError(
                    f"{place}: {size[0]} x {size[1]} pixels cannot be read by this model: {error}"
                ) from error
            self._expansions[size] = list(self._tokenizer.encode(text, add_special_tokens=False))
        return self._expansions[size]

    def collapse(self, token_ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[int]:
        """The ids with one placeholder for each image.

        Args:
            token_ids: [T] expanded.
            spans: [start, end) of each image, ascending.
        """
        collapsed: list[int] = []
        done = 0
        for start, end in spans:
            collapsed += [*token_ids[done:start], self.image_token_id]
            done = end
        return [*collapsed, *token_ids[done:]]

    def _encode(self, text: str) -> list[int]:
        """Ids of a text without placeholders of images, besides those that ``literal`` marked."""
        return self._literal.encode(text, lambda part: list(self._tokenizer.encode(part, add_special_tokens=False)))

    # --- pixels

    def model_inputs(
        self,
        images_of_rows: Sequence[Sequence[CanonicalImage | Image]],
        input_ids_BT: torch.Tensor,
        blank: Blank | None = None,
    ) -> dict[str, torch.Tensor]:
        """What the model's forward pass takes besides token ids, for a right-padded batch.

        Args:
            images_of_rows: [B] the images of each row, in the order of their tokens; a row may have none.
            input_ids_BT: the rows, images expanded.
            blank: what one more row shows, the last of ``input_ids_BT``.

        Returns:
            ``pixel_values`` and the like; of a batch without images, only what text needs too.

        Raises:
            DataError: a row's image tokens are not those of its images.
        """
        features = [[self._features(image) for image in images] for images in images_of_rows]
        if blank is not None:
            features.append([blank.features])
        expected = [sum(self._family.num_features(feature) for feature in row) for row in features]
        found: list[int] = (input_ids_BT == self.image_token_id).sum(dim=1).tolist()
        for row, (has, needs) in enumerate(zip(found, expected, strict=True)):
            if has != needs:
                raise DataError(
                    f"row {row} of the batch has {has} image tokens, and its {len(features[row])} images have {needs} "
                    "features: it was cut inside an image, or made with another image processor"
                )
        return self._family.collate(features, input_ids_BT == self.image_token_id)

    @cached_property
    def blank(self) -> Blank:
        """A white image."""
        from PIL import Image

        text, settings = self._family.blank(BLANK_SIZE)
        token_ids = list(self._tokenizer.encode(text, add_special_tokens=False))
        image = Image.new("RGB", BLANK_SIZE, "white")
        return Blank(token_ids, dict(self._image_processor(images=[image], return_tensors="pt", **settings)))

    def _features(self, image: CanonicalImage | Image) -> dict[str, torch.Tensor]:
        """One image at a time: what it becomes never depends on what it is batched with."""
        if not isinstance(image, CanonicalImage):
            return dict(self._image_processor(images=[image], return_tensors="pt"))
        found = self._recent.get(image.sha256)
        if found is None:
            found = dict(self._image_processor(images=[image.to_pil()], return_tensors="pt"))
            self._recent.put(image.sha256, found)
        return found

    # --- which one it is

    @cached_property
    def description(self) -> dict[str, Any]:
        """What decides the pixel values and the image tokens: class, settings, versions. A JSON value."""
        settings: Mapping[str, Any] = self._image_processor.to_dict()
        made_by = type(self._image_processor)
        packages = ["transformers", "pillow", *(() if made_by.__name__.endswith("Pil") else ("torchvision",))]
        return {
            "family": self._family.name,
            "image_processor": f"{made_by.__module__}.{made_by.__qualname__}",
            "settings": json.loads(
                json.dumps({k: v for k, v in settings.items() if not k.startswith("_")}, default=str)
            ),
            "tokens": self._family.settings,
            "versions": {name: version(name) for name in packages},
        }

    @cached_property
    def fingerprint(self) -> str:
        """sha256, hex, of the description."""
        return hashlib.sha256(json.dumps(self.description, sort_keys=True).encode()).hexdigest()


def _image_processor(model_path: str, trust_remote_code: bool) -> Any:
    """As vLLM's own loader picks it: torchvision's where that is installed, else Pillow's."""
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(f"no image processor in {model_path!r}: {error}; check actor.model_name_or_path") from error


def _chat_template(model_path: str) -> str | None:
    """The processor's chat template: in a file of its own, or in an older form of one."""
    from transformers.utils import cached_file

    for name in ("chat_template.jinja", "chat_template.json"):
        found = cached_file(model_path, name, _raise_exceptions_for_missing_entries=False)
        if found is not None:
            text = Path(found).read_text(encoding="utf-8")
            return text if name.endswith("jinja") else str(json.loads(text)["chat_template"])
    return None
