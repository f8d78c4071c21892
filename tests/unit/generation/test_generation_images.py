"""From a request with images to what vLLM is given; vLLM's renderer follows a script, the image processor is real."""

from types import SimpleNamespace

import pytest
import vision_rows

from rlhf_core.data.tiny_vision_model import make_tiny_vision_model
from rlhf_core.errors import ConfigError, CorruptShardError, GenerationError
from rlhf_core.generation.engine import _token_prompt
from rlhf_core.generation.images import EngineImages
from rlhf_core.records import GenerateRequest, SamplingParams
from rlhf_core.vision import VisionProcessor

pytestmark = pytest.mark.agents


class Renderer:
    """Expands as it is told, and remembers what it was asked."""

    def __init__(self, image_processor, expand):
        self.asked, self._expand = [], expand
        info = SimpleNamespace(get_hf_processor=lambda: SimpleNamespace(image_processor=image_processor))
        self._processor = SimpleNamespace(info=info)
        self._mm_processor_cache, self._mm_processor_only_cache = "kept in step", "this process only"

    def get_mm_processor(self):
        return self._processor

    async def process_for_engine_async(self, prompt, arrival_time):
        self.asked.append(prompt)
        return {"type": "multimodal", "prompt_token_ids": self._expand(prompt["prompt_token_ids"])}


@pytest.fixture(scope="module")
def processor(tmp_path_factory) -> VisionProcessor:
    return VisionProcessor.load(str(make_tiny_vision_model(tmp_path_factory.mktemp("models") / "tiny-vlm")))


@pytest.fixture
def album():
    return vision_rows.Album()


def request(processor, album, text):
    ids, images = vision_rows.show(processor, album, text)
    return GenerateRequest("r", ids, SamplingParams(max_tokens=1), "", images=images)


def rendering(processor, album, asked, expand=None, load=None):
    right = asked.prompt_token_ids
    renderer = Renderer(processor._image_processor, expand or (lambda ids: list(right)))
    return renderer, EngineImages(processor, load or album.load, SimpleNamespace(renderer=renderer))


async def test_vllm_gets_one_placeholder_an_image_and_the_images_by_name(processor, album):
    asked = request(processor, album, "a <image> and <image>")
    renderer, images = rendering(processor, album, asked)

    made = await images.engine_input(asked)

    [prompt] = renderer.asked
    assert prompt["prompt_token_ids"].count(processor.image_token_id) == 2
    assert [picture.size for picture in prompt["multi_modal_data"]["image"]] == [(56, 56), (60, 30)]
    assert prompt["multi_modal_uuids"]["image"] == [image.sha256 for image in asked.images]
    assert made["prompt_token_ids"] == asked.prompt_token_ids


async def test_another_expansion_than_the_requests_fails_it_with_both_lengths(processor, album):
    asked = request(processor, album, "<image>")
    _, images = rendering(processor, album, asked, expand=lambda ids: [*asked.prompt_token_ids, 65])

    with pytest.raises(GenerationError, match=r"request r: the prompt has 34 tokens, vLLM makes 35 of it"):
        await images.engine_input(asked)


async def test_an_image_token_of_no_image_is_refused(processor, album):
    asked = GenerateRequest("r", [65, processor.image_token_id], SamplingParams(max_tokens=1), "")
    _, images = rendering(processor, album, asked)

    with pytest.raises(GenerationError, match=r"request r: 0 images, and 1 image tokens"):
        await images.engine_input(asked)


async def test_a_request_without_images_is_its_tokens(processor, album):
    asked = request(processor, album, "no image")
    renderer, images = rendering(processor, album, asked)

    assert await images.engine_input(asked) == {"type": "token", "prompt_token_ids": asked.prompt_token_ids}
    assert renderer.asked == []


async def test_an_image_that_cannot_be_read_is_the_requests_error(processor, album):
    def damaged(image):
        raise CorruptShardError(f"{image.uri} is damaged")

    asked = request(processor, album, "<image>")
    _, images = rendering(processor, album, asked, load=damaged)

    with pytest.raises(GenerationError, match=r"request r: images/\w+\.png is damaged"):
        await images.engine_input(asked)


def test_the_sending_process_believes_nothing_of_the_other_ones_cache(processor, album):
    renderer, _ = rendering(processor, album, request(processor, album, "<image>"))

    assert renderer._mm_processor_cache == "this process only"


def test_another_image_processor_in_vllm_is_refused(processor, album):
    renderer = Renderer(SimpleNamespace(), None)

    with pytest.raises(ConfigError, match=r"vLLM reads images with types\.SimpleNamespace, the trainer with .*Pil"):
        EngineImages(processor, album.load, SimpleNamespace(renderer=renderer))


def test_an_engine_that_reads_text_only_refuses_images(processor, album):
    with pytest.raises(GenerationError, match=r"request r shows 1 images, and this engine reads text only"):
        _token_prompt(request(processor, album, "<image>"))
