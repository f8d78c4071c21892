"""A vision-language model of our own making: ``builtin:tiny-vlm``, the counterpart of ``builtin:tiny`` that sees.

A random Idefics3 of two layers on either side, 0.15 million parameters, which needs no torchvision. An image of any size
becomes up to 2 x 2 tiles of 28 pixels and one of the whole: 20 image tokens in a span of 34.

    ids   0–259  as of builtin:tiny: bytes, <|bos|> <|im_start|> <|im_end|> <|pad|>
    ids 260–263  <image> <fake_token_around_image> <global-img> <end_of_utterance>
    ids 264–299  <row_1_col_1> … <row_6_col_6>
    ids 300–319  pairs of letters, only ever sampled
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rlhf_core.data.tiny_model import BOS, EOS, MAX_LENGTH, PAD, SPECIAL_TOKENS, VOCAB_SIZE, make_tokenizer, published

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 2  # part of the cache folder's name: raise it whenever the model, its tokenizer or image processor changes
TILE, PATCH, SCALE = 28, 7, 2  # pixels of a tile's and a patch's side; SCALE x SCALE patches are one token
TOKENS_PER_TILE = (TILE // PATCH // SCALE) ** 2
# Standard deviations of the weights. With the usual .02 an image has no effect on what is said; with .15 in the language model
# too, what differs between two images drowns, and GRPO settles on one answer to all of them before it learns to see.
SPREAD_OF_SIGHT = 0.15  # vision tower and connector
SPREAD = 0.05
IMAGE_TOKENS = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
IMAGE = 260
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% elif part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_vision_model(folder: Path | str, seed: int = 0) -> Path:
    """Write the model, its tokenizer and its image processor to ``folder``, or leave a finished one as it is.

    As ``make_tiny_model``: whole or not at all, and the same seed gives the same weights.

    Raises:
        ConfigError: ``folder`` holds something else.
    """

    def write(draft: Path) -> None:
        _model(seed).save_pretrained(draft)
        make_tokenizer((*SPECIAL_TOKENS, *IMAGE_TOKENS), CHAT_TEMPLATE).save_pretrained(draft)
        settings = {**_image_processor().to_dict(), "processor_class": "Idefics3Processor"}
        _write_json(draft / "preprocessor_config.json", settings)
        _write_json(
            draft / "processor_config.json", {"processor_class": "Idefics3Processor", "image_seq_len": TOKENS_PER_TILE}
        )

    return published(folder, write)


def _model(seed: int) -> Any:
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    config = Idefics3Config(
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": TILE,
            "patch_size": PATCH,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": MAX_LENGTH,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "pad_token_id": PAD,
        },
        image_token_id=IMAGE,
        scale_factor=SCALE,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Idefics3ForConditionalGeneration(config).to(torch.float32)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:  # not the norms and the biases
                sees = name.startswith(("model.vision_model.", "model.connector."))
                torch.nn.init.normal_(parameter, std=SPREAD_OF_SIGHT if sees else SPREAD)
    return model


def _image_processor() -> Any:
    from transformers import Idefics3ImageProcessorPil

    return Idefics3ImageProcessorPil(size={"longest_edge": 2 * TILE}, max_image_size={"longest_edge": TILE})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, default=str) + "\n", encoding="utf-8")
