"""Prompts that show images: where they go, what is refused and when, and what a run keeps of them."""

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from rlhf_core.config.model import DataConfig
from rlhf_core.data import Vision, load_prompts, load_tokenizer
from rlhf_core.data.image_parts import as_parts
from rlhf_core.data.tiny_vision_model import IMAGE, make_tiny_vision_model
from rlhf_core.errors import DataError
from rlhf_core.vision import VisionProcessor, canonical

pytestmark = pytest.mark.agents

IMAGE_PART = {"type": "image"}


class Shelf:
    """Keeps images in a dict, and counts how often one was read."""

    def __init__(self):
        self.images, self.reads = {}, 0

    def keep(self, sha256, read):
        if sha256 not in self.images:
            self.reads += 1
            self.images[sha256] = read()
        return f"images/{sha256}.png"


@pytest.fixture(scope="session")
def seeing(tmp_path_factory):
    """(tokenizer, processor) of the tiny vision-language model."""
    folder = str(make_tiny_vision_model(tmp_path_factory.mktemp("models") / "tiny-vlm"))
    return load_tokenizer(folder), VisionProcessor.load(folder)


@pytest.fixture
def shelf():
    return Shelf()


@pytest.fixture
def load_seen(seeing, shelf):
    """``load_seen("a.jsonl", max_prompt_len=64)``: a dataset of a policy that sees."""
    tokenizer, processor = seeing

    def load_with(spec, max_prompt_len=1000, **keys):
        defaults = {"label_key": None, "max_images_per_prompt": 2, "apply_chat_template": True}
        data = DataConfig(prompt_dataset=[spec], **{**defaults, **keys})
        return load_prompts([spec], "train", data, tokenizer, max_prompt_len, vision=Vision(processor, shelf))

    return load_with


def png(colour="red", size=(28, 28)):
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def pictures(tmp_path):
    """Paths of a red and a blue picture."""
    for name in ("red", "blue"):
        (tmp_path / f"{name}.png").write_bytes(png(name, (28, 56)))
    return [str(tmp_path / f"{name}.png") for name in ("red", "blue")]


def texts(prompt):
    """The content of the user's message."""
    return prompt.messages[-1]["content"]


def text_part(text):
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("What?", [IMAGE_PART, IMAGE_PART, text_part("What?")]),
        ("<image> or <image>?", [IMAGE_PART, text_part(" or "), IMAGE_PART, text_part("?")]),
        ("<image><image>", [IMAGE_PART, IMAGE_PART]),
        ([{"role": "user", "content": "What?"}], [IMAGE_PART, IMAGE_PART, text_part("What?")]),
        (
            [{"role": "user", "content": [text_part("A"), IMAGE_PART, text_part("B"), IMAGE_PART]}],
            [text_part("A"), IMAGE_PART, text_part("B"), IMAGE_PART],
        ),
    ],
)
def test_where_the_images_of_a_column_go(write_rows, load_seen, pictures, shelf, content, shown):
    prompt = load_seen(write_rows("jsonl", [{"input": content, "images": pictures}]))[0]

    red, blue = (canonical(Image.open(path)) for path in pictures)
    assert texts(prompt) == shown
    assert [image.sha256 for image in prompt.images] == [red.sha256, blue.sha256]
    assert [image.uri for image in prompt.images] == [f"images/{one.sha256}.png" for one in (red, blue)]
    assert shelf.images == {red.sha256: red, blue.sha256: blue}
    for image in prompt.images:
        assert IMAGE in prompt.token_ids[image.start : image.end]
    outside = [id for i, id in enumerate(prompt.token_ids) if not any(im.start <= i < im.end for im in prompt.images)]
    assert IMAGE not in outside


@pytest.mark.parametrize(
    "part",
    [
        lambda path: {"type": "image", "image": path},
        lambda path: {"type": "image_url", "image_url": {"url": f"file://{path}"}},
        lambda path: {"type": "image", "path": path, "url": None},
    ],
)
def test_a_message_may_hold_its_image_itself(write_rows, load_seen, pictures, part):
    content = [{"role": "user", "content": [text_part("What?"), part(pictures[0])]}]

    prompt = load_seen(write_rows("jsonl", [{"input": content}]))[0]

    assert texts(prompt) == [text_part("What?"), IMAGE_PART]
    assert [image.sha256 for image in prompt.images] == [canonical(Image.open(pictures[0])).sha256]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_every_format_holds_images(write_rows, load_seen, pictures, kind):
    images = pictures[0] if kind == "csv" else [{"bytes": png(), "path": None}] if kind == "parquet" else pictures[:1]

    prompt = load_seen(write_rows(kind, [{"input": "What?", "images": images}]))[0]

    assert len(prompt.images) == 1


def test_images_of_the_datasets_library_are_decoded_or_not(tmp_path, load_seen):
    import datasets

    rows = {"input": ["What?"], "images": [[{"bytes": png(), "path": None}]]}
    features = datasets.Features({"input": datasets.Value("string"), "images": datasets.Sequence(datasets.Image())})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "saved"))

    prompt = load_seen(str(tmp_path / "saved"))[0]

    assert prompt.images[0].sha256 == canonical(Image.new("RGB", (28, 28), "red")).sha256


def test_rows_with_two_one_and_no_image(write_rows, load_seen, pictures):
    rows = [{"input": "a", "images": pictures}, {"input": "b", "images": pictures[:1]}, {"input": "c", "images": []}]

    prompts = list(load_seen(write_rows("jsonl", rows)))

    assert [len(prompt.images) for prompt in prompts] == [2, 1, 0]
    assert IMAGE not in prompts[2].token_ids


def test_the_same_image_twice_in_a_row_is_shown_twice_and_stored_once(write_rows, load_seen, pictures, shelf):
    prompt = load_seen(write_rows("jsonl", [{"input": "<image> or <image>?", "images": pictures[:1] * 2}]))[0]

    first, second = prompt.images
    assert first.sha256 == second.sha256
    assert first.end < second.start
    assert len(shelf.images) == 1


@pytest.mark.parametrize("chat", [True, False])
def test_case_96_a_placeholder_in_a_text_prompt_stays_text(write_rows, load_seen, chat):
    prompt = load_seen(
        write_rows("jsonl", [{"input": "see <image> <row_1_col_1>"}]), apply_chat_template=chat, max_images_per_prompt=1
    )[0]

    assert "see <image> <row_1_col_1>" in prompt.text
    assert prompt.images == ()
    assert bytes(i for i in prompt.token_ids if i < 256).decode().count("<image>") == 1
    assert IMAGE not in prompt.token_ids


def test_the_words_of_the_policy_and_of_tools_mark_nothing(write_rows, load_seen, pictures):
    chat = [
        {"role": "user", "content": "Draw."},
        {"role": "assistant", "content": "<image>"},
        {"role": "user", "content": "What is it?"},
    ]
    tools = [{"type": "function", "function": {"name": "see", "description": "an <image>"}}]

    prompt = load_seen(write_rows("jsonl", [{"input": chat, "images": pictures[:1], "tools": tools}]))[0]

    assert prompt.messages[0]["content"] == [IMAGE_PART, text_part("Draw.")]
    assert prompt.messages[1]["content"] == [text_part("<image>")]
    assert prompt.text.count("<image>") == 3
    assert len(prompt.images) == 1


def test_the_ids_are_those_of_the_text_with_every_image_expanded(write_rows, load_seen, pictures, seeing):
    prompt = load_seen(write_rows("jsonl", [{"input": "A <image> B", "images": pictures[:1]}]), system_prompt="Look.")[
        0
    ]

    tokenizer, processor = seeing
    expansion = tokenizer.decode(processor.expansion((28, 56)))
    assert prompt.token_ids == tokenizer.encode(prompt.text.replace("<image>", expansion), add_special_tokens=False)
    assert prompt.messages[0] == {"role": "system", "content": [text_part("Look.")]}


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        ({"input": "a", "images": 3}, {}, r"row 1 .*: 3 images, and data.max_images_per_prompt=2"),
        (
            {"input": "<image>", "images": 2},
            {},
            r"row 1 .*: the prompt has room for 1 images of its column, which has 2",
        ),
        (
            {"input": [{"role": "user", "content": [IMAGE_PART]}]},
            {},
            "has room for 1 images of its column, which has 0",
        ),
        ({"input": "a", "images": 1}, {"apply_chat_template": False}, "images need data.apply_chat_template=true"),
        (
            {"input": "a", "images": 1},
            {"tokenizer_chat_template": "{% for m in messages %}{{ m.content[-1].text }}{% endfor %}"},
            "the chat template writes 0 placeholders .* for the prompt's 1 images: set data.tokenizer_chat_template",
        ),
        ({"input": [{"role": "system", "content": "a"}], "images": 1}, {}, "no message of the user's to show them in"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_its_row(write_rows, load_seen, pictures, row, keys, message):
    row = row | {"images": (pictures * 2)[: row.get("images", 0)]}
    chat = [{"role": "user", "content": "fine"}] if not isinstance(row["input"], str) else "fine"
    path = write_rows("jsonl", [{"input": chat, "images": []}, row])

    with pytest.raises(DataError, match=message):
        load_seen(path, **keys)


def test_case_96_a_broken_file_of_two_is_named_with_its_row(write_rows, load_seen, pictures, tmp_path):
    (tmp_path / "broken.png").write_bytes(png()[:-30])
    path = write_rows("jsonl", [{"input": "a", "images": [pictures[0], str(tmp_path / "broken.png")]}])

    with pytest.raises(DataError, match=r"row 0 \(line 1\): the image .*broken\.png: its pixels cannot be read"):
        load_seen(path)


def test_the_first_bad_row_is_told_of_whatever_is_read_at_once(write_rows, load_seen):
    path = write_rows("jsonl", [{"input": "a", "images": [f"no/{number}.png"]} for number in range(40)])

    with pytest.raises(DataError, match=r"row 0 .*no/0\.png: there is no such file"):
        load_seen(path)


def test_only_the_rows_that_are_used_are_looked_at(seeing, shelf, write_rows, pictures):
    rows = [{"input": "a", "images": pictures[:1]}] * 2 + [{"input": "b", "images": ["no/such.png"]}]
    path = write_rows("jsonl", rows)
    data = DataConfig(prompt_dataset=[path], label_key=None, max_images_per_prompt=1, apply_chat_template=True)

    dataset = load_prompts([path], "train", data, seeing[0], 1000, max_samples=2, vision=Vision(seeing[1], shelf))

    assert len(dataset) == 2


def test_case_93_an_overlong_prompt_is_dropped_and_never_cut(write_rows, load_seen, tmp_path):
    """Images of 28 x 28 and 280 x 28 pixels; the limit is exactly what the first needs."""
    rows = [{"input": "?", "images": [f"{tmp_path}/{name}.png"]} for name in ("square", "wide")]
    (tmp_path / "square.png").write_bytes(png(size=(28, 28)))
    (tmp_path / "wide.png").write_bytes(png(size=(280, 28)))
    path = write_rows("jsonl", rows)
    lengths = sorted(len(prompt.token_ids) for prompt in load_seen(path))
    assert lengths[0] < lengths[1]

    dataset = load_seen(path, max_prompt_len=lengths[0])

    assert [len(prompt.token_ids) for prompt in dataset] == lengths[:1]
    assert dataset.overlong == 1
    with pytest.raises(DataError, match=f"the prompt has {lengths[1]} tokens, and {lengths[0]} "):
        load_seen(path, max_prompt_len=lengths[0], overlong="error")


def test_an_image_is_stored_when_its_prompt_is_drawn_and_only_once(write_rows, load_seen, pictures, shelf):
    dataset = load_seen(write_rows("jsonl", [{"input": text, "images": pictures[:1]} for text in "abc"]))
    assert shelf.images == {}

    dataset.keep_images(range(3))
    prompts = list(dataset)

    assert shelf.reads == 1
    assert len({prompt.images for prompt in prompts}) == 1


def test_what_came_with_the_row_waits_outside_of_memory(write_rows, load_seen, shelf):
    rows = [{"input": "a", "images": [{"bytes": png(colour), "path": None}]} for colour in ("red", "blue", "red")]
    dataset = load_seen(write_rows("parquet", rows))

    kept = [dataset._rows[index].images[0] for index in range(3)]

    assert kept[0].origin == kept[2].origin != kept[1].origin
    assert dataset._images._end == len(png("red")) + len(png("blue"))
    assert [shelf.images[prompt.images[0].sha256].to_pil().getpixel((0, 0)) for prompt in dataset] == [
        (255, 0, 0),
        (0, 0, 255),
        (255, 0, 0),
    ]


def test_a_file_that_changes_meanwhile_is_an_error_that_names_it(write_rows, load_seen, pictures):
    dataset = load_seen(write_rows("jsonl", [{"input": "a", "images": pictures[:1]}]))
    Path(pictures[0]).write_bytes(png("green", (28, 56)))

    with pytest.raises(
        DataError, match=r"red\.png is not the one that was there when this process started: restore it"
    ):
        dataset[0]


def test_the_fingerprint_knows_the_pixels(write_rows, load_seen, pictures):
    path = write_rows("jsonl", [{"input": "a", "images": pictures[:1]}])
    before = load_seen(path).fingerprint()
    assert load_seen(path).fingerprint() == before

    Path(pictures[0]).write_bytes(png("green", (28, 56)))

    assert load_seen(path).fingerprint() != before


def test_the_fingerprint_of_text_is_what_it_was_before_there_were_images(write_rows, load, load_seen):
    path = write_rows("jsonl", [{"input": "a"}])

    assert load(path).fingerprint() == load_seen(path).fingerprint()


def test_image_parts_for_a_policy_that_reads_text_are_refused(write_rows, load, pictures):
    content = [{"role": "user", "content": [IMAGE_PART | {"image": pictures[0]}]}]

    with pytest.raises(DataError, match="the prompt has image parts, but data.max_images_per_prompt=0"):
        load(write_rows("jsonl", [{"input": content}]), apply_chat_template=True)


def test_parts_from_arrow_with_empty_keys_are_parts():
    content = [
        {"role": "user", "content": [text_part("a") | {"image": None}, IMAGE_PART | {"text": None, "image": "x"}]}
    ]

    messages, sources = as_parts(content, [], None, "row 0")

    assert messages[0]["content"] == [text_part("a"), IMAGE_PART]
    assert sources == ["x"]
    json.dumps(messages)
