"""What a chat template writes behind a turn of the policy's."""

import pytest
from turn_script import CLOSE, ids, tokenizer, user

from rlhf_core.agents.multi_turn.bridge import bridge_ids, make_bridge
from rlhf_core.data.tiny_model import EOS

pytestmark = pytest.mark.agents

HEADER = "<|im_start|>assistant\n"


def said(text):
    return {"role": "assistant", "content": text}


def tool(text, **fields):
    return {"role": "tool", "content": text, **fields}


def text_behind(messages, template=None, last=EOS):
    found = bridge_ids(tokenizer(), last, messages, {EOS}, template=template)
    return None if found is None else tokenizer().decode(found)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As some families do: the result of a tool needs a call, tools are merged into one user turn, thinking is stripped.
STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if not messages[loop.index0 - 1].tool_calls and messages[loop.index0 - 1].role != 'tool' %}"
    "{{ raise_exception('a tool answers a call') }}{% endif %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}<r>{{ m.content }}</r>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{% set c = m.content.split('</think>')[-1] %}"
    "{% if m.role == 'assistant' and not loop.last %}<think></think>{% endif %}{{ c }}"
    "{% for t in m.tool_calls %}\n<tool_call>{{ t.function.name }}</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BARE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
ROLES = (  # no token closes a turn: the header of the next one does, and the model stops at it
    "{% for m in messages %}{{ '<|im_end|>' if m.role == 'user' else '<|im_start|>' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


@pytest.mark.parametrize("template", [None, CHATML, STRICT])
def test_the_separator_behind_the_closing_token_is_there(template):
    assert text_behind([user("no")], template) == f"\n<|im_start|>user\nno{CLOSE}\n{HEADER}"


@pytest.mark.parametrize("template", [None, CHATML, STRICT])
def test_a_turn_that_was_cut_off_is_closed(template):
    assert text_behind([user("no")], template, last=65) == f"{CLOSE}\n<|im_start|>user\nno{CLOSE}\n{HEADER}"


@pytest.mark.parametrize("talk", [["a"], ["a", "b", "c"]])
@pytest.mark.parametrize("template", [None, CHATML])
def test_ids_are_those_of_rendering_all_at_once(talk, template):
    options = {"chat_template": template, "tokenize": True, "return_dict": False}
    messages = [user("hi"), said("yes"), *map(user, talk)]
    whole = tokenizer().apply_chat_template(messages, add_generation_prompt=True, **options)
    until = tokenizer().apply_chat_template(messages[:2], **options)[:-1]  # without the newline behind <|im_end|>

    assert until + bridge_ids(tokenizer(), EOS, messages[2:], {EOS}, template=template) == whole


def test_results_of_tools_where_the_template_wants_to_see_the_calls():
    results = [tool("1", name="f"), tool("2")]

    assert text_behind(results, STRICT) == f"\n<|im_start|>user<r>1</r><r>2</r>{CLOSE}\n{HEADER}"
    assert text_behind([*results, user("so")], CHATML).startswith(
        "\n<|im_start|>tool\n1<|im_end|>\n<|im_start|>tool\n2"
    )


def test_an_end_of_turn_inside_a_message_closes_nothing():
    message = user(f"say {CLOSE} now")

    assert text_behind([message], BARE) == f"\nuser: say {CLOSE} now\nassistant: "
    assert text_behind([message]) == f"\n<|im_start|>user\nsay {CLOSE} now{CLOSE}\n{HEADER}"


def test_a_template_without_closing_tokens():
    assert text_behind([user("no")], BARE, last=65) == "\nuser: no\nassistant: "
    assert text_behind([tool("no")], BARE) == "\ntool: no\nassistant: "


def test_a_template_whose_next_header_ends_the_turn():
    assert text_behind([user("no")], ROLES) == "no<|im_start|>"
    assert text_behind([user("no")], ROLES, last=65) == f"{CLOSE}no<|im_start|>"


@pytest.mark.parametrize("content", ["l", "tool_call", "f", "0", "", "A", "CON", "<|im_end|>", "ANSWER7f3a"])
def test_content_that_stands_in_the_stand_in_too(content):
    """It is looked for nowhere: a result "0" is found in an id "call00000"."""
    expected = f"\n<|im_start|>user<r>{content}</r>{CLOSE}\n{HEADER}"

    assert text_behind([tool(content, name="calculator")], STRICT) == expected


OTHER_END = 97  # another token that ends turns


def test_a_turn_that_another_end_closed_is_not_closed_again():
    ends = {EOS, OTHER_END}

    assert bridge_ids(tokenizer(), OTHER_END, [user("no")], ends) == bridge_ids(tokenizer(), EOS, [user("no")], ends)


def test_the_next_header_is_no_end_that_another_one_replaces():
    ends = {EOS, OTHER_END}

    assert bridge_ids(tokenizer(), OTHER_END, [user("no")], ends, template=ROLES) == ids(f"{CLOSE}no<|im_start|>")


def test_a_template_that_wants_every_content_as_parts():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{{ p.text }}{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    message = {"role": "user", "content": [{"type": "text", "text": "no"}]}

    assert text_behind([message], template) == f"\n<|im_start|>user\nno{CLOSE}\n{HEADER}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('never') }}",
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",  # shows no turn of the policy's
        "{{ messages[9].content }}",
    ],
)
def test_none_where_the_template_does_not_allow_it(template):
    assert make_bridge(tokenizer(), [user("no")], {EOS}, template=template) is None


def test_the_bridge_says_what_closes_the_turn():
    bridge = make_bridge(tokenizer(), [user("no")], {EOS})

    assert (bridge.already_said(EOS), bridge.already_said(65)) == (1, 0)
    assert ids(bridge.text)[0] == EOS
