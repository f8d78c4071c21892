"""The families of vision-language models that were checked here: how many tokens an image has, and how a batch is laid out.

    idefics3, smolvlm       <fake><row_1_col_1><image>…<fake><row_1_col_2><image>…\\n\\n<fake><global-img><image>…<fake>
                            pixel_values [B, tiles, 3, H, W], padded with tiles of zeros, which the model drops
    qwen2_vl, qwen2_5_vl,   <|image_pad|>… between <|vision_start|> and <|vision_end|>, which the chat template writes
    qwen3_vl                pixel_values [patches of the whole batch, D], image_grid_thw [images, 3], mm_token_type_ids [B, T]

To add one: a class here, a line in ``FAMILIES``, and the comparison of log-probs between engine and trainer
(tests/pipeline) with two images in a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    # what the image processor makes of one image
    Features = dict[str, torch.Tensor]


class Family(ABC):
    """How one family shows images."""

    name: ClassVar[str]
    image_token: ClassVar[str]  # what the chat template writes where an image goes, and the model puts its features
    banned_tokens: ClassVar[tuple[str, ...]]  # mean an image or video wherever they stand: never to be sampled
    settings: dict[str, Any]  # what decides the tokens besides the image processor

    @abstractmethod
    def reserved_tokens(self, tokenizer: Any) -> list[str]:
        """Every string that the tokenizer reads as a part of an image, where a user may have written it as text."""

    @abstractmethod
    def expansion(self, size: tuple[int, int]) -> str:
        """The text that takes the placeholder's place, for an image of (width, height).

        Raises:
            ValueError: the family takes no image of that shape.
        """

    def blank(self, size: tuple[int, int]) -> tuple[str, dict[str, Any]]:
        """The expansion of an image that nobody asks about, and the settings of the image processor that keep it short."""
        return self.expansion(size), {}

    @abstractmethod
    def num_features(self, features: Features) -> int:
        """Image tokens that one image must have."""

    @abstractmethod
    def collate(self, rows: Sequence[Sequence[Features]], shows_image_BT: torch.Tensor) -> dict[str, torch.Tensor]:
        """The inputs of a batch from the features of each row's images; ``shows_image_BT`` is true at image tokens."""

    @staticmethod
    def id_of(tokenizer: Any, token: str) -> int:
        """The id of a token that the family cannot do without; ``ConfigError`` if the tokenizer lacks it."""
        found = Family.known_ids(tokenizer, [token])
        if not found:
            raise ConfigError(f"the tokenizer of the model has no token {token!r}: its files do not belong together")
        return found[0]

    @staticmethod
    def known_ids(tokenizer: Any, tokens: Iterable[str]) -> list[int]:
        """The ids of those tokens that the tokenizer has as one token each."""
        vocabulary = tokenizer.get_vocab()
        return [vocabulary[token] for token in tokens if token in vocabulary]


class Idefics3(Family):
    """Tiles of one size, row by row, and then the whole image as one tile."""

    name = "idefics3"
    image_token = "<image>"
    banned_tokens = ("<image>",)
    FAKE = "<fake_token_around_image>"
    GLOBAL = "<global-img>"

    def __init__(self, config: Any, image_processor: Any) -> None:
        self._image_processor = image_processor
        side = config.vision_config.image_size // config.vision_config.patch_size
        self._tokens_per_tile: int = side**2 // config.scale_factor**2
        self.settings = {"tokens_per_tile": self._tokens_per_tile}

    def reserved_tokens(self, tokenizer: Any) -> list[str]:
        """See the base class."""
        tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
        vocabulary = tokenizer.get_vocab()
        return [self.image_token, *(token for token in (self.FAKE, self.GLOBAL, *tiles) if token in vocabulary)]

    def expansion(self, size: tuple[int, int]) -> str:
        """See the base class."""
        width, height = size
        _, rows, columns = self._image_processor.get_number_of_image_patches(height, width, {})
        if not rows:
            return self._whole
        tile = self._tile
        lines = (
            "".join(f"{self.FAKE}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        return "".join(lines) + "\n" + self._whole

    def blank(self, size: tuple[int, int]) -> tuple[str, dict[str, Any]]:
        """In one tile. The smallest image is otherwise blown up and split: 17 tiles, 1,088 image tokens of SmolVLM."""
        return self._whole, {"do_image_splitting": False}

    @property
    def _tile(self) -> str:
        return self.image_token * self._tokens_per_tile

    @property
    def _whole(self) -> str:
        return f"{self.FAKE}{self.GLOBAL}{self._tile}{self.FAKE}"

    def num_features(self, features: Features) -> int:
        """See the base class."""
        return int(features["pixel_values"].shape[1]) * self._tokens_per_tile

    def collate(self, rows: Sequence[Sequence[Features]], shows_image_BT: torch.Tensor) -> dict[str, torch.Tensor]:
        """See the base class."""
        import torch

        if not any(rows):
            return {}
        inputs = {}
        for name in ("pixel_values", "pixel_attention_mask"):
            like = next(row[0][name] for row in rows if row)[0, :0]  # no tile of the right shape
            tiles = [torch.cat([like, *(features[name][0] for features in row)]) for row in rows]
            inputs[name] = torch.nn.utils.rnn.pad_sequence(tiles, batch_first=True)
        return inputs


class QwenVL(Family):
    """A grid of patches of the image's own shape."""

    name = "qwen_vl"
    image_token = "<|image_pad|>"
    banned_tokens = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")

    def __init__(self, config: Any, image_processor: Any) -> None:
        self._image_processor = image_processor
        self._patches_per_token: int = config.vision_config.spatial_merge_size**2
        self.settings = {"patches_per_token": self._patches_per_token}

    def reserved_tokens(self, tokenizer: Any) -> list[str]:
        """See the base class."""
        return list(self.banned_tokens)

    def expansion(self, size: tuple[int, int]) -> str:
        """See the base class."""
        width, height = size
        patches: int = self._image_processor.get_number_of_image_patches(height, width, {})
        return self.image_token * (patches // self._patches_per_token)

    def num_features(self, features: Features) -> int:
        """See the base class."""
        return int(features["image_grid_thw"].prod()) // self._patches_per_token

    def collate(self, rows: Sequence[Sequence[Features]], shows_image_BT: torch.Tensor) -> dict[str, torch.Tensor]:
        """See the base class."""
        import torch

        images = [features for row in rows for features in row]
        if not images:
            return {}
        return {
            "pixel_values": torch.cat([features["pixel_values"] for features in images]),
            "image_grid_thw": torch.cat([features["image_grid_thw"] for features in images]),
            # Without it the positions of image tokens are those of text, and no error tells so.
            "mm_token_type_ids": shows_image_BT.to(torch.int64),
        }


FAMILIES: dict[str, Callable[[Any, Any], Family]] = {
    "idefics3": Idefics3,
    "smolvlm": Idefics3,
    "qwen2_vl": QwenVL,
    "qwen2_5_vl": QwenVL,
    "qwen3_vl": QwenVL,
}
