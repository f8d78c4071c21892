"""Prompts that are rendered with the tools of ``agent.tools``."""

import json

import pytest

from rlhf_core.config.model import DataConfig
from rlhf_core.data import load_prompts
from rlhf_core.errors import DataError

pytestmark = pytest.mark.agents

ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
DEAF = "{% for message in messages %}{{ message.content }}{% endfor %}"
HARD = (
    "{{ tools | tojson }}{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}"
    "{% endif %}{{ message.content }}{% endfor %}"
)
SILENT = "{{ tools | tojson }}{% for message in messages if message.role != 'tool' %}{{ message.content }}{% endfor %}"
STRICT = (
    "{{ tools | tojson }}{% for message in messages %}"
    "{% if message.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('a result without a call') }}{% endif %}{{ message.content }}{% endfor %}"
)


@pytest.fixture
def load_with_tools(tokenizer, write_rows):
    def load(rows, tools, **keys):
        specs = (write_rows("jsonl", rows),)
        data = DataConfig(**({"prompt_dataset": specs, "label_key": None, "apply_chat_template": True} | keys))
        return load_prompts(specs, "train", data, tokenizer, 4000, tools=tools)

    return load


def test_each_prompt_shows_the_tools(load_with_tools, tokenizer):
    prompts = load_with_tools([{"input": "1 + 1?"}, {"input": "2 + 2?"}], [ADD])

    messages = [{"role": "user", "content": "2 + 2?"}]
    at_once = tokenizer.apply_chat_template(
        messages, tools=[ADD], tokenize=True, return_dict=False, add_generation_prompt=True
    )
    assert prompts[1].token_ids == at_once
    assert json.dumps(ADD) in prompts[0].text


def test_the_fingerprint_tells_other_tools(load_with_tools):
    rows = [{"input": "1 + 1?"}]
    other = {"type": "function", "function": ADD["function"] | {"description": "Sum."}}

    assert load_with_tools(rows, [ADD]).fingerprint() != load_with_tools(rows, [other]).fingerprint()
    assert load_with_tools(rows, [ADD]).fingerprint() == load_with_tools(rows, [ADD]).fingerprint()


def test_rows_with_tools_of_their_own_are_refused(load_with_tools):
    with pytest.raises(DataError, match=r"row.*column 'tools' holds tools, and agent.tools gives others"):
        load_with_tools([{"input": "hi", "tools": [ADD]}], [ADD])


def test_their_column_may_be_left_aside(load_with_tools):
    prompts = load_with_tools([{"input": "hi", "tools": [ADD]}], [ADD], tools_key="no_such_column")

    assert len(prompts) == 1


def test_a_template_that_hides_the_tools_is_refused(load_with_tools):
    with pytest.raises(
        DataError, match=r"does not show the policy its tools \(add\): set data.tokenizer_chat_template"
    ):
        load_with_tools([{"input": "hi"}], [ADD], tokenizer_chat_template=DEAF)


def test_unless_they_are_described_by_hand(load_with_tools):
    keys = {"tokenizer_chat_template": DEAF, "system_prompt": "Call add like so: ..."}

    assert load_with_tools([{"input": "hi"}], [ADD], **keys)[0].text == "Call add like so: ...hi"


def test_tools_need_a_chat_template(load_with_tools):
    with pytest.raises(DataError, match="tools need data.apply_chat_template=true"):
        load_with_tools([{"input": "hi"}], [ADD], apply_chat_template=False)


@pytest.mark.parametrize(("template", "reason"), [(HARD, r" \(no tools here\)"), (SILENT, "")])
def test_a_template_that_tells_no_results_is_refused(load_with_tools, template, reason):
    with pytest.raises(
        DataError, match=f"does not tell what a tool returned{reason}: set data.tokenizer_chat_template"
    ):
        load_with_tools([{"input": "hi"}], [ADD], tokenizer_chat_template=template)


def test_a_template_may_want_the_call_before_the_result(load_with_tools):
    assert len(load_with_tools([{"input": "hi"}], [ADD], tokenizer_chat_template=STRICT)) == 1
