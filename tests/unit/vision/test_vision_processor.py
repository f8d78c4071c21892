"""Placeholder tokens and pixel values of a real processor: the built-in Idefics3 and, where they can be made, Qwen-VL's."""

import json
import random
import subprocess
import sys

import pytest
import torch
from PIL import Image
from qwen_files import write_qwen
from vision_samples import picture

from rlhf_core.data.tiny_vision_model import IMAGE, make_tiny_vision_model
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.vision import ImageSpan, VisionProcessor, canonical

pytestmark = pytest.mark.agents

PAD = 259
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SIZES = ((28, 28), (280, 28), (30, 90))  # (width, height)


@pytest.fixture(scope="session")
def idefics(tmp_path_factory):
    return make_tiny_vision_model(tmp_path_factory.mktemp("models") / "tiny-vlm")


@pytest.fixture(scope="session")
def folders(tmp_path_factory, idefics):
    root = tmp_path_factory.mktemp("qwen")
    return {"idefics3": idefics} | {kind: write_qwen(root / kind, kind) for kind in QWEN}


@pytest.fixture(scope="session")
def processors(folders):
    return {kind: VisionProcessor.load(str(folder)) for kind, folder in folders.items()}


@pytest.fixture(params=["idefics3", *QWEN])
def processor(request, processors):
    return processors[request.param]


def images(*sizes):
    return [canonical(picture(*size, seed=index)) for index, size in enumerate(sizes)]


def padded(rows):
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)


def test_a_text_model_has_none(tiny_model):
    assert VisionProcessor.load(str(tiny_model)) is None


def test_a_family_that_was_not_checked_is_refused(tmp_path):
    from transformers import LlavaConfig

    LlavaConfig().save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match=r"type 'llava'.* use one of the types idefics3"):
        VisionProcessor.load(str(tmp_path))


def test_the_ids_are_those_of_the_models_own_processor(idefics, processors):
    from transformers import AutoProcessor

    theirs = AutoProcessor.from_pretrained(idefics)
    for count in (1, 2):
        pictures = images(*SIZES[:count])
        text = "Look: " + "<image>" * count + "\nHow many?"

        expected = theirs(text=[text], images=[[image.to_pil() for image in pictures]])["input_ids"][0]

        bos = [theirs.tokenizer.bos_token_id]
        assert bos + processors["idefics3"].tokenise(text, pictures).token_ids == expected


@pytest.mark.parametrize("kind", QWEN)
def test_an_image_of_qwen_has_a_token_for_each_merged_patch(processors, kind):
    processor = processors[kind]
    pictures = images((56, 84))

    [(start, end)] = processor.tokenise(f"a{processor.placeholder}b", pictures).spans
    grid = processor.model_inputs([pictures], padded([[processor.image_token_id] * (end - start)]))["image_grid_thw"]

    assert end - start == int(grid.prod()) // 4


def test_case_93_counts_are_equal_for_any_size(processor):
    sizes = random.Random(0)
    for size in [
        (28, 28),
        (280, 28),
        (28, 280),
        (1, 1),
        *((sizes.randint(3, 300), sizes.randint(3, 300)) for _ in range(12)),
    ]:
        pictures = [Image.new("RGB", size, "red")]
        row = processor.tokenise(processor.placeholder, pictures).token_ids

        processor.model_inputs([pictures], torch.tensor([row]))  # raises where they differ


def test_a_shape_that_the_model_does_not_take_is_an_error(processors):
    with pytest.raises(DataError, match=r"row 7, image 1: 1 x 500 pixels cannot be read by this model: .*aspect ratio"):
        processors["qwen2_vl"].tokenise_sizes("<|image_pad|>" * 2, [(9, 9), (1, 500)], "row 7")


def test_two_images_side_by_side_are_two(processor):
    pictures = images(*SIZES[:2])

    ids, spans = processor.tokenise(f"a{processor.placeholder * 2}b", pictures)

    assert spans[0].start == 1
    assert spans[0].end == spans[1].start
    assert spans[1].end == len(ids) - 1
    assert processor.collapse(ids, spans) == [ids[0], *[processor.image_token_id] * 2, ids[-1]]


def test_a_placeholder_too_many_or_too_few_is_an_error(processor):
    with pytest.raises(DataError, match="row 7 has 1 image placeholders .* and 2 images"):
        processor.tokenise(processor.placeholder, images(*SIZES[:2]), "row 7")
    with pytest.raises(DataError, match="row 7 has 1 image placeholders .* and 0 images"):
        processor.tokenise(processor.placeholder, [], "row 7")


@pytest.mark.parametrize(
    "text",
    ["see <image>", "<|image_pad|><|vision_start|>", "<fake_token_around_image><row_1_col_2><global-img>", "\ue5f1"],
)
def test_case_96_a_placeholder_that_is_only_text_stays_text(processor, text):
    ids, spans = processor.tokenise(processor.literal(f"a {text}") + processor.placeholder, images((28, 28)))

    own = ids[: spans[0].start]
    assert processor._tokenizer.decode(own) == f"a {text}"
    assert not processor.placeholder_ids & set(own)
    assert max(own) < 256  # bytes, no special tokens
    assert processor.readable(processor.literal(text)) == text


def test_placeholder_ids_are_never_to_be_sampled(processors):
    assert processors["idefics3"].placeholder_ids == {IMAGE}
    tokenizer = processors["qwen2_vl"]._tokenizer
    banned = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    assert processors["qwen2_vl"].placeholder_ids == set(tokenizer.convert_tokens_to_ids(list(banned)))


def test_collapsing_nothing_changes_nothing(processor):
    assert processor.collapse([1, 2, 3], []) == [1, 2, 3]
    assert processor.collapse([1, 9, 9, 2, 9, 3], [ImageSpan(1, 3), ImageSpan(4, 5)])[0::2] == [1, 2, 3]


def test_a_batch_of_rows_with_two_one_and_no_image(processor):
    rows = [images(*SIZES[:2]), [], images(SIZES[2])]
    ids = [processor.tokenise("x" + processor.placeholder * len(row), row).token_ids for row in rows]

    batch = processor.model_inputs(rows, padded(ids))

    for index, row in enumerate(rows):
        alone = processor.model_inputs([row], torch.tensor([ids[index]]))
        for name, values in alone.items():
            assert torch.equal(values, of_row(batch, name, rows, index, values.shape)), (name, index)
    shows = batch.get("mm_token_type_ids")
    assert shows is None or torch.equal(shows, (padded(ids) == processor.image_token_id).long())


def of_row(batch, name, rows, index, shape):
    """What of a batch belongs to one row: its first tiles (Idefics3), its images' patches and grids (Qwen), its tokens."""
    if name == "mm_token_type_ids":
        return batch[name][index : index + 1, : shape[1]]
    if name == "image_grid_thw":
        first = sum(map(len, rows[:index]))
        return batch[name][first : first + shape[0]]
    if "image_grid_thw" in batch:
        images_before = sum(map(len, rows[:index]))
        first = int(batch["image_grid_thw"][:images_before].prod(dim=1).sum())
        return batch[name][first : first + shape[0]]
    assert not batch[name][index, shape[1] :].any(), "the rest is padding"
    return batch[name][index : index + 1, : shape[1]]


def test_a_batch_without_images_needs_nothing(processor):
    assert processor.model_inputs([[], []], torch.zeros(2, 3, dtype=torch.long)) == {}


def test_a_blank_image_is_one_more_row_of_as_few_tokens_as_there_can_be(processor):
    text = [1, 2, 3]
    blank = processor.blank

    batch = processor.model_inputs([[]], padded([text, blank.token_ids]), blank)

    assert len(blank.token_ids) <= 8
    assert torch.equal(batch["pixel_values"][-1], blank.features["pixel_values"][-1])


def test_a_row_cut_inside_an_image_is_an_error(processor):
    pictures = images(SIZES[0])
    ids = processor.tokenise(processor.placeholder, pictures).token_ids

    with pytest.raises(DataError, match="row 0 of the batch has .* cut inside an image"):
        processor.model_inputs([pictures], torch.tensor([ids[: len(ids) // 2]]))


def test_a_canonical_image_and_the_same_as_pil_give_the_same_pixels(processor):
    [image] = images(SIZES[1])
    ids = torch.tensor([processor.tokenise(processor.placeholder, [image]).token_ids])

    left, right = (processor.model_inputs([[one]], ids) for one in (image, image.to_pil()))

    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_another_process_has_the_same_fingerprint_and_pixels(idefics, processors):
    code = (
        "import sys, hashlib, torch; sys.path.insert(0, sys.argv[2]); from vision_samples import picture;"
        "from rlhf_core.vision import VisionProcessor, canonical; v = VisionProcessor.load(sys.argv[1]);"
        "i = [canonical(picture(280, 28))]; ids = torch.tensor([v.tokenise('<image>', i).token_ids]);"
        "p = v.model_inputs([i], ids)['pixel_values'];"
        "print(v.fingerprint, hashlib.sha256(p.numpy().tobytes()).hexdigest())"
    )
    here = __file__.rpartition("/")[0]
    said = subprocess.run([sys.executable, "-c", code, str(idefics), here], capture_output=True, text=True, check=True)

    import hashlib

    processor = processors["idefics3"]
    image = [canonical(picture(280, 28))]
    pixels = processor.model_inputs([image], torch.tensor([processor.tokenise("<image>", image).token_ids]))[
        "pixel_values"
    ]
    expected = [processor.fingerprint, hashlib.sha256(pixels.numpy().tobytes()).hexdigest()]
    assert said.stdout.split()[-2:] == expected


def test_another_setting_is_another_fingerprint(idefics, processors, tmp_path):
    import shutil

    other = tmp_path / "other"
    shutil.copytree(idefics, other)
    settings = json.loads((other / "preprocessor_config.json").read_text())
    (other / "preprocessor_config.json").write_text(json.dumps(settings | {"image_mean": [0.4, 0.5, 0.5]}))

    found = VisionProcessor.load(str(other))

    assert found.fingerprint != processors["idefics3"].fingerprint
    assert found.description["versions"] == processors["idefics3"].description["versions"]
