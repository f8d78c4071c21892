"""The built-in tiny vision-language model."""

import hashlib
import json

import pytest
import torch
from PIL import Image

from rlhf_core.data import end_of_sequence_ids, load_tokenizer, resolve_model, tiny_model, tiny_vision_model
from rlhf_core.data.tiny_vision_model import IMAGE, IMAGE_TOKENS, make_tiny_vision_model
from rlhf_core.errors import ConfigError
from rlhf_core.vision import VisionProcessor

pytestmark = pytest.mark.agents


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return make_tiny_vision_model(tmp_path_factory.mktemp("models") / "tiny-vlm")


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_the_same_seed_gives_the_same_bytes(folder, tmp_path):
    assert digests(make_tiny_vision_model(tmp_path / "same")) == digests(folder)
    other = digests(make_tiny_vision_model(tmp_path / "other", seed=1))
    assert {name for name in other if other[name] != digests(folder)[name]} == {"model.safetensors"}


def test_making_it_leaves_the_callers_random_state_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)

    make_tiny_vision_model(tmp_path / "tiny-vlm")

    assert torch.equal(torch.rand(3), expected)


def test_its_name_makes_it_where_models_are_kept(tmp_path):
    path = resolve_model("builtin:tiny-vlm?seed=3", tmp_path)

    assert path == str((tmp_path / f"tiny-vlm-{tiny_vision_model.FORMAT}-seed3").resolve())
    assert resolve_model("builtin:tiny-vlm?seed=3", tmp_path) == path
    with pytest.raises(ConfigError, match="use 'builtin:tiny', .* or 'builtin:tiny-vlm'"):
        resolve_model("builtin:tiny-vl", tmp_path)


def test_its_vocabulary_is_that_of_builtin_tiny_with_image_tokens(folder):
    tokenizer = load_tokenizer(str(folder))

    assert tokenizer.encode("aä", add_special_tokens=False) == list("aä".encode())
    assert tokenizer.encode("".join(tiny_model.SPECIAL_TOKENS), add_special_tokens=False) == [256, 257, 258, 259]
    expected = list(range(IMAGE, IMAGE + len(IMAGE_TOKENS)))
    assert tokenizer.encode("".join(IMAGE_TOKENS), add_special_tokens=False) == expected
    assert all(tokenizer.decode([token]) for token in range(320))
    assert len(tokenizer) == 320
    assert end_of_sequence_ids(str(folder), tokenizer) == (tiny_model.EOS,)


def test_its_template_shows_images_where_they_are(folder):
    chat = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]},
    ]

    text = load_tokenizer(str(folder)).apply_chat_template(chat, tokenize=False, add_generation_prompt=True)

    assert text == (
        "<|bos|><|im_start|>system\nLook.<|im_end|>\n<|im_start|>user\na<image>b<|im_end|>\n<|im_start|>assistant\n"
    )


def test_what_it_says_depends_on_what_it_sees(folder):
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = VisionProcessor.load(str(folder))
    logprobs = []
    for colour in ("red", "blue"):
        images = [Image.new("RGB", (56, 56), colour)]
        ids = torch.tensor([processor.tokenise("<image>?", images).token_ids])
        with torch.no_grad():
            logits = model(input_ids=ids, **processor.model_inputs([images], ids)).logits
        logprobs.append(logits[0, -1].log_softmax(-1))

    assert sum(parameter.numel() for parameter in model.parameters()) < 160_000
    assert str(model.dtype) == "torch.float32"
    assert (logprobs[0] - logprobs[1]).abs().max() > 0.5


def test_it_reads_images_without_torchvision(folder):
    settings = json.loads((folder / "preprocessor_config.json").read_text())

    assert settings["image_processor_type"].startswith("Idefics3ImageProcessor")
    assert settings["processor_class"] == "Idefics3Processor"
