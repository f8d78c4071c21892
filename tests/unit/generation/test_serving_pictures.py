"""Images of messages: whatever the client sends, one canonical form is shown to vLLM and stored once."""

import base64
import io
from types import SimpleNamespace

import numpy as np
import openai
import pytest
from PIL import Image

from rlhf_core.agents.sessions import CallRefusedError, message_key
from rlhf_core.generation.serving.pictures import Pictures
from rlhf_core.vision import canonical
from rlhf_core.vision.sources import ImageLimits

pytestmark = pytest.mark.agents

SEES = SimpleNamespace(is_multimodal_model=True)
PIXELS = np.random.default_rng(1).integers(0, 256, (8, 12, 3), dtype=np.uint8)


def message(image, kind="PNG", url=None):
    written = io.BytesIO()
    image.save(written, kind)
    url = url or f"data:image/{kind.lower()};base64," + base64.b64encode(written.getvalue()).decode()
    return {
        "role": "user",
        "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}],
    }


async def test_the_same_picture_in_three_files_is_one_image() -> None:
    stored = []
    pictures = Pictures(SEES, lambda png: stored.append(png) or "images/a.png", ImageLimits())
    rgb = Image.fromarray(PIXELS)
    messages = [message(rgb), message(rgb, "BMP"), message(rgb.convert("RGBA"))]

    taken = await pictures.take_in(messages)

    assert [picture.sha256 for picture in taken] == [canonical(rgb).sha256] * 3
    assert len(stored) == 1
    assert len({message_key(each) for each in messages}) == 1
    part = messages[2]["content"][1]
    assert (part["type"], part["image_pil"].mode) == ("image_pil", "RGB")
    np.testing.assert_array_equal(np.asarray(part["image_pil"]), PIXELS)


@pytest.mark.parametrize("url", ["data:image/png;base64,AAAA", "file:///etc/hostname", "http://127.0.0.1:9/x.png", "x"])
async def test_an_image_that_cannot_be_had_is_the_clients_error(url) -> None:
    pictures = Pictures(SEES, lambda png: "images/a.png", ImageLimits())

    with pytest.raises(CallRefusedError) as refused:
        await pictures.take_in([message(Image.fromarray(PIXELS), url=url)])

    assert refused.value.status == 400


async def test_without_a_store_images_are_refused_not_lost() -> None:
    with pytest.raises(CallRefusedError, match="max_images_per_prompt"):
        await Pictures(SEES, None, ImageLimits()).take_in([message(Image.fromarray(PIXELS))])


async def test_a_model_that_reads_text_says_so(server, playing) -> None:
    async with playing(server) as play:
        with pytest.raises(openai.BadRequestError):
            await play.chat([message(Image.fromarray(PIXELS))])
        record = await play.close()

    assert record.refused_calls == 1
