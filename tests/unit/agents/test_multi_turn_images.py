"""Images in what an environment shows: where they are in the row, and what the engine is asked with."""

import pytest
from turn_script import CLOSE, Answers, Speaks, goes_on, ids, is_done, plain, play_turns, tokenizer

from rlhf_core.errors import AgentError, DataError
from rlhf_core.records import ImageRef, Prompt

pytestmark = pytest.mark.agents

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PICTURE = {"type": "image"}


class Intake:
    """Three tokens an image, named by its bytes."""

    placeholder = "<image>"

    async def tokenise(self, text, images):
        pieces = text.split("<image>") if images else [text]
        if len(pieces) != len(images) + 1:
            raise DataError(f"{len(pieces) - 1} placeholders for {len(images)} images")
        token_ids, places = ids(pieces[0]), []
        for image, piece in zip(images, pieces[1:], strict=True):
            places.append(ImageRef(image.hex(), "", len(token_ids), len(token_ids) + 3))
            token_ids += [9, 9, 9, *ids(piece)]
        return token_ids, tuple(places)


def shows(text, *images, **fields):
    return goes_on(text, environment_images=list(images), **fields)


async def test_images_of_text_feedback():
    policy = Speaks("A", "B")

    [row] = await play_turns(
        policy, Answers([shows("x<image>y<image>", b"1", b"2"), is_done()]), plain("ab"), images=Intake()
    )

    assert row.token_ids.tolist() == [256, *ids("abAx"), 9, 9, 9, *ids("y"), 9, 9, 9, *ids("B")]
    assert row.images == (ImageRef("31", "", 5, 8), ImageRef("32", "", 9, 12))
    assert policy.requests[1].images == row.images
    assert policy.requests[0].images == ()
    assert row.transcript == "Ax[image]y[image]B"


async def test_images_of_a_chat_message_behind_a_closed_turn():
    """The closing token was sampled, so the bridge begins one token later, and so do its images."""
    message = {"role": "user", "content": [PICTURE, {"type": "text", "text": "see"}]}
    policy = Speaks(f"A{CLOSE}", "B")

    [row] = await play_turns(
        policy, Answers([shows(message, b"1"), is_done()]), images=Intake(), chat_template=TEMPLATE
    )

    [image] = row.images
    assert row.token_ids[image.start : image.end].tolist() == [9, 9, 9]
    assert tokenizer().decode(row.token_ids[row.action_ranges[0].end : image.start]) == "\n<|im_start|>user\n"
    assert policy.requests[1].images == (image,)


async def test_images_of_the_prompt_stay_where_they_are():
    image = ImageRef("aa", "", 1, 4)
    prompt = Prompt("row", "plain", "<image>ab", [256, 9, 9, 9, *ids("ab")], images=(image,))
    policy = Speaks("A", "B")

    [row] = await play_turns(policy, Answers([shows("<image>", b"1"), is_done()]), prompt, images=Intake())

    assert row.images == (image, ImageRef("31", "", 7, 10))
    assert [len(request.images) for request in policy.requests] == [1, 2]


async def test_images_of_the_first_observation():
    observation = {"observation": "<image>go", "environment_images": [b"1"]}

    [row] = await play_turns(Speaks("A"), Answers([is_done()], observation), plain("ab"), images=Intake())

    assert row.token_ids.tolist() == [256, 9, 9, 9, *ids("goA")]
    assert row.images == (ImageRef("31", "", 1, 4),)


async def test_a_prompt_with_images_is_not_replaced_by_text():
    prompt = Prompt("row", "plain", "<image>", [9, 9, 9], images=(ImageRef("aa", "", 0, 3),))

    with pytest.raises(AgentError, match="the observation of reset is not the prompt, which has images"):
        await play_turns(Speaks("A"), Answers([is_done()], {"observation": "x"}), prompt, images=Intake())


async def test_placeholders_and_images_that_differ_are_a_failure():
    with pytest.raises(DataError, match="0 placeholders for 1 images"):
        await play_turns(Speaks("A", "B"), Answers([shows("x", b"1")]), plain("ab"), images=Intake())


async def test_what_reads_like_a_placeholder_stays_text():
    message = {"role": "user", "content": [PICTURE, {"type": "text", "text": "not <image>"}]}

    [row] = await play_turns(
        Speaks(f"A{CLOSE}", "B"), Answers([shows(message, b"1"), is_done()]), images=Intake(), chat_template=TEMPLATE
    )

    [image] = row.images
    assert row.token_ids[image.start : image.end].tolist() == [9, 9, 9]
    assert tokenizer().decode(row.token_ids[image.end : row.action_ranges[1].start]).startswith("not <image><|im_end|>")


async def test_feedback_without_images_has_no_placeholders():
    [row] = await play_turns(Speaks("A", "B"), Answers([goes_on("<image>"), is_done()]), plain("ab"), images=Intake())

    assert row.token_ids.tolist() == [256, *ids("abA<image>B")]


async def test_image_parts_and_images_that_differ_are_a_failure():
    message = {"role": "user", "content": [PICTURE]}

    with pytest.raises(AgentError, match="writes 1 image placeholders .* came with 0 images"):
        await play_turns(Speaks(f"A{CLOSE}", "B"), Answers([shows(message)]), images=Intake(), chat_template=TEMPLATE)
