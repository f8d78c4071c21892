"""The files of a Qwen-VL model without its weights: configuration, tokenizer, image processor, chat template."""

import json

from rlhf_core.data.tiny_model import SPECIAL_TOKENS, make_tokenizer

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_qwen(folder, kind):
    """``kind``: qwen2_vl, qwen2_5_vl or qwen3_vl. Returns the folder."""
    from transformers import AutoConfig

    folder.mkdir(parents=True)
    patch = 16 if kind == "qwen3_vl" else 14
    tokenizer = make_tokenizer((*SPECIAL_TOKENS, *VISION_TOKENS), CHAT_TEMPLATE)
    ids = dict(zip(VISION_TOKENS, tokenizer.convert_tokens_to_ids(list(VISION_TOKENS)), strict=True))
    vision = {"patch_size": patch, "spatial_merge_size": 2}
    AutoConfig.for_model(kind, vision_config=vision, image_token_id=ids["<|image_pad|>"]).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": patch,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 100},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder
