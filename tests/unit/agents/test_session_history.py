"""When two conversations are the same, and how a prompt continues a reply."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.agents.sessions import Conversation, Span, message_key, splice

pytestmark = pytest.mark.agents


def call(arguments, name="f", call_id="c1"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
        ({"role": "assistant"}, {"role": "assistant", "content": "", "tool_calls": None}),
        ({"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "a"}]}),
        ({"role": "assistant", "content": "a "}, {"role": "assistant", "content": "a", "refusal": None}),
        ({"role": "assistant", "content": "a"}, {"role": "assistant", "content": "a", "reasoning": "hm"}),
        (
            {"role": "assistant", "tool_calls": [call('{"a":  1, "b": 2}')]},
            {"role": "assistant", "tool_calls": [call('{"b":2,"a":1}')], "annotations": []},
        ),
        (
            {"role": "assistant", "tool_calls": [call({"a": 1})]},  # what vLLM makes of it in place
            {"role": "assistant", "tool_calls": [call('{"a": 1}')]},
        ),
    ],
)
def test_what_makes_no_difference(one, other) -> None:
    assert message_key(one) == message_key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "a"}, {"role": "system", "content": "a"}),
        ({"role": "user", "content": "a "}, {"role": "user", "content": "a"}),
        ({"role": "assistant", "tool_calls": [call("{}")]}, {"role": "assistant", "tool_calls": [call("{}", "g")]}),
        ({"role": "assistant", "tool_calls": [call("{")]}, {"role": "assistant", "tool_calls": [call("{ ")]}),
        ({"role": "tool", "content": "a", "tool_call_id": "1"}, {"role": "tool", "content": "a", "tool_call_id": "2"}),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:1"}}]},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:2"}}]},
        ),
    ],
)
def test_what_makes_one(one, other) -> None:
    assert message_key(one) != message_key(other)


def test_a_conversation_knows_its_beginnings() -> None:
    messages = [{"role": "user", "content": str(i)} for i in range(3)]
    whole = Conversation.of(messages, {"tools": None})

    assert whole.digests[:3] == Conversation.of(messages[:2], {"tools": None}).digests
    assert whole == Conversation.of(messages[:1], {"tools": None}).then(messages[1:])
    assert whole == Conversation.of([], {"tools": None}).instead(messages)
    assert whole.whole != Conversation.of(messages, {"tools": ["f"]}).whole


def test_the_stored_tokens_replace_the_rendered_ones() -> None:
    spliced = splice([1, 2, 90, 91], [], [5, 6], [1, 2, 40, 41, 42, 5, 6], [])

    assert spliced.token_ids == [1, 2, 90, 91, 5, 6]


def test_images_of_the_new_messages_move_along() -> None:
    stored, rendered = [1, 7, 7, 2, 90], [1, 7, 7, 2, 40, 41, 5, 8, 8, 8, 6]

    spliced = splice(stored, [Span(1, 3)], [5, 8, 6], rendered, [Span(1, 3), Span(7, 10)])

    assert spliced.token_ids == [1, 7, 7, 2, 90, 5, 8, 8, 8, 6]
    assert spliced.spans == [Span(1, 3), Span(6, 9)]
    assert spliced.token_ids[6:9] == [8, 8, 8]


@pytest.mark.parametrize(
    ("bridge", "rendered", "spans"),
    [
        ([5, 6], [1, 2, 40, 5, 7], []),  # the template writes something else there
        ([1, 2, 40, 5, 6, 9, 9], [1, 2], []),  # longer than all
        ([6], [1, 8, 8, 6], [Span(1, 3)]),  # an image that is not among the new messages
    ],
)
def test_a_bridge_that_does_not_fit_is_not_used(bridge, rendered, spans) -> None:
    assert splice([1, 90], [], bridge, rendered, spans) is None


@given(st.lists(st.integers(0, 5)), st.lists(st.integers(0, 5)), st.lists(st.integers(0, 5)))
def test_a_spliced_prompt_is_the_stored_ids_and_the_bridge(stored, bridge, before) -> None:
    spliced = splice(stored, [], bridge, [*before, *bridge], [])

    assert spliced is not None
    assert spliced.token_ids == [*stored, *bridge]
