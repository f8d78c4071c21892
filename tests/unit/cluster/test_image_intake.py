"""Images on their way into a run: stored for good, found again, and the same image processor from start to end."""

import asyncio
import io
from functools import partial

import numpy as np
import pytest
from PIL import Image

from rlhf_core.cluster.image_intake import RunImages
from rlhf_core.cluster.images import image_loader
from rlhf_core.config import parse_config
from rlhf_core.data.tiny_vision_model import IMAGE, make_tiny_vision_model
from rlhf_core.errors import ConfigError, CorruptShardError, DataError
from rlhf_core.records import ActionRange, Experience, ImageRef
from rlhf_core.storage import RunStore
from rlhf_core.training.ahead import ahead
from rlhf_core.training.visual import ImageReader
from rlhf_core.vision import VisionProcessor, canonical
from rlhf_core.vision.sources import ImageLimits

pytestmark = pytest.mark.agents

RED, BLUE = (Image.new("RGB", (28, 56), colour) for colour in ("red", "blue"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return str(make_tiny_vision_model(tmp_path_factory.mktemp("models") / "tiny-vlm"))


@pytest.fixture(scope="session")
def processor(folder):
    return VisionProcessor.load(folder)


@pytest.fixture
def store(tmp_path):
    return RunStore("run", str(tmp_path))


@pytest.fixture
def images(store, processor):
    return RunImages(store, processor, ImageLimits())


def config(model, **data):
    return parse_config(
        {
            "actor": {"model_name_or_path": model},
            "data": {"prompt_dataset": "x.jsonl", **data},
            "reward": {"functions": [{"use": "digits"}]},
        }
    )


def file_of(image, kind="PNG"):
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


async def test_images_of_feedback_are_durable_and_in_their_place(images, store, processor):
    ids, refs = await images.tokenise("a<image>b<image>", [file_of(RED), file_of(BLUE, "BMP")])

    assert [image_loader(store)(ref) for ref in refs] == [canonical(RED), canonical(BLUE)]
    assert [ids[0], ids[refs[0].end]] == [97, 98]
    assert refs[1].end == len(ids)
    assert processor.collapse(ids, [(ref.start, ref.end) for ref in refs]) == [97, IMAGE, 98, IMAGE]


async def test_an_image_that_is_shown_again_is_stored_once(images, store):
    await asyncio.gather(*(images.tokenise("<image>", [file_of(RED, kind)]) for kind in ("PNG", "BMP", "PPM")))

    assert len(store.objects.list("images")) == 1


async def test_feedback_without_images_shows_none(images):
    ids, refs = await images.tokenise("<image>", [])

    assert (bytes(ids), refs) == (b"<image>", ())


@pytest.mark.parametrize(
    ("text", "shown", "message"),
    [
        ("<image><image>", [file_of(RED)], "environment feedback has 2 image placeholders .* and 1 images"),
        ("", [file_of(RED)], "has 0 image placeholders .* and 1 images"),
        ("<image><image>", [file_of(RED), b"none"], "environment feedback, image 1: the image of 4 bytes is no image"),
    ],
)
async def test_feedback_that_does_not_fit_is_an_error(images, store, text, shown, message):
    with pytest.raises(DataError, match=message):
        await images.tokenise(text, shown)
    assert store.objects.list("images") == []


def test_what_is_durable_is_not_read_again(images):
    image = canonical(RED)
    path = images.keep(image.sha256, lambda: image)

    assert images.keep(image.sha256, lambda: pytest.fail("read again")) == path


def test_another_process_keeps_the_same_object(images, store, processor):
    image = canonical(RED)

    paths = {RunImages(store, processor, ImageLimits()).keep(image.sha256, lambda: image) for _ in range(2)}

    assert paths == set(store.objects.list("images"))
    assert image_loader(store)(ImageRef(image.sha256, paths.pop(), 0, 1)) == image


@pytest.mark.parametrize(
    ("damage", "message"), [(None, "is missing: a row shows this image"), (b"x", "is damaged: its sha256")]
)
def test_an_image_that_is_missing_or_damaged_is_named_where_it_is_trained_on(images, store, processor, damage, message):
    """Before any row of its micro-batch is looked at by the model."""
    token_ids, shown = asyncio.run(images.tokenise("<image>", [file_of(RED)]))
    row = Experience(
        "g", 0, 0, np.array([*token_ids, 1], np.int32), (ActionRange(len(token_ids), len(token_ids) + 1),),
        *[np.zeros(len(token_ids) + 1, np.float32)] * 2, None, None, *[np.zeros(len(token_ids) + 1, np.float32)] * 2,
        0.0, 0.0, 1.0, False, shown,
    )  # fmt: skip
    (store.objects.delete if damage is None else partial(store.objects.put, data=damage))(shown[0].uri)
    batches = ahead(ImageReader(processor, image_loader(store), blank_rows=True).experiences, [[row]])

    with pytest.raises(CorruptShardError, match=rf"{shown[0].uri} {message}"):
        next(batches)


def test_a_run_of_text_has_none_and_a_policy_that_reads_text_is_refused(store, tiny_model, folder):
    assert RunImages.of(config(folder), folder, store) is None
    with pytest.raises(
        ConfigError, match=r"data.max_images_per_prompt=1, but actor.model_name_or_path=.* reads text only"
    ):
        RunImages.of(config(str(tiny_model), max_images_per_prompt=1), str(tiny_model), store)


def test_the_processor_of_the_start_is_the_processor_to_the_end(store, processor, folder):
    wanted = config(folder, max_images_per_prompt=1)
    assert RunImages.of(wanted, folder, store) is not None  # nothing to compare with yet
    store.write_run({"vision": processor.description})

    assert RunImages.of(wanted, folder, store) is not None


@pytest.mark.parametrize("key", ["versions.pillow", "settings.resample", "image_processor"])
def test_another_processor_than_the_run_began_with_is_refused(store, processor, folder, key):
    section, _, name = key.partition(".")
    recorded = processor.description
    recorded = recorded | {section: recorded[section] | {name: "9"} if name else "9"}
    store.write_run({"vision": recorded})

    with pytest.raises(ConfigError, match=rf"began with another image processor \({key}: '9', here"):
        RunImages.of(config(folder, max_images_per_prompt=1), folder, store)
