"""Tool calls in what a policy said."""

import pytest

from rlhf_core.agents.tools.calls import ToolCall, find_calls

pytestmark = pytest.mark.agents

ADDING = '{"name": "add", "arguments": {"a": 1}}'
ADD = ToolCall("add", {"a": 1})


def call(body):
    return f"<tool_call>{body}</tool_call>"


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "add", "arguments": {"a": 1}}',
        '\n{"name":"add","arguments":{"a":1}}\n',
        '  {  "arguments"  :\t{"a":1.0e0}\n,\n"name":   " add "}  ',
        '{"name": "add", "arguments": "{\\"a\\": 1}"}',
        '{"name": "add", "parameters": {"a": 1}}',
        '{"type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 1}"}, "id": "x"}',
    ],
)
def test_one_call_in_many_spellings(body):
    assert find_calls(call(body), "hermes") == [ADD]


def test_several_calls_with_text_around_them():
    said = f"Let me see. {call(ADDING)} and " + call('{"name": "now"}') + " Done."

    assert find_calls(said, "hermes") == [ADD, ToolCall("now", {})]


@pytest.mark.parametrize("said", ["", "The answer is 4.", "</tool_call>", '{"name": "add", "arguments": {"a": 1}}'])
def test_no_call(said):
    assert find_calls(said, "hermes") == []


def test_thinking_calls_nothing():
    thought = f"<think>I could {call(ADDING)}</think>"

    assert find_calls(f"{thought}It is 4.", "hermes") == []
    assert find_calls(f"{thought}{call(ADDING)}", "hermes") == [ADD]


def test_code_with_line_breaks_and_the_closing_tag_in_it():
    body = '{"name": "python", "arguments": {"code": "print(\'</tool_call>\')\nprint(2)"}}'

    assert find_calls(call(body), "hermes") == [ToolCall("python", {"code": "print('</tool_call>')\nprint(2)"})]


def test_a_call_need_not_be_closed():
    assert find_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}', "hermes") == [ADD]


@pytest.mark.parametrize(
    ("body", "name", "problem"),
    [
        ("add(1)", "", "the tool call is no JSON: Expecting value (character 0)"),
        ("", "", "the tool call is no JSON: Expecting value (character 0)"),
        (
            '{"name": "add", "arguments": {"a": 1}',
            "",
            "the tool call is no JSON: Expecting ',' delimiter (character 37)",
        ),
        ('{"name": "add"} and {"name": "add"}', "", "after the JSON of the tool call, </tool_call> is expected"),
        ("[1, 2]", "", 'a tool call is an object {"name": ..., "arguments": {...}}'),
        ('{"arguments": {"a": 1}}', "", 'the tool call has no "name"'),
        ('{"name": 7}', "", 'the tool call has no "name"'),
        ('{"name": "add", "arguments": [1]}', "add", '"arguments" must be an object with the parameters by name'),
        ('{"name": "add", "arguments": "a=1"}', "add", '"arguments" is no JSON: Expecting value (character 0)'),
        ('{"name": "add", "arguments": ' + "[" * 9999, "", "the tool call is no JSON: it is nested too deeply"),
        (
            '{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}",
            "",
            "the tool call is no JSON: Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits",
        ),
    ],
)
def test_a_malformed_call_is_a_call_with_a_problem(body, name, problem):
    assert find_calls(call(body), "hermes") == [ToolCall(name, {}, problem)]


def test_a_malformed_call_does_not_hide_the_next():
    said = call("add(1)") + call(ADDING)

    first, second = find_calls(said, "hermes")

    assert first.problem
    assert second == ADD


@pytest.mark.parametrize(
    "said",
    [
        '{"name": "add", "arguments": {"a": 1}}',
        'I add: {"name": "add", "parameters": {"a": 1}}',
        '```json\n{ "name": "add", "arguments": {"a": 1}}\n```',
        '[{"name": "add", "arguments": {"a": 1}}]',
        '{"type": "function", "name": "add", "parameters": {"a": 1}}',
        '<think>{"name": "f"}</think>{"name": "add", "arguments": {"a": 1}}',
    ],
)
def test_a_bare_call(said):
    assert find_calls(said, "json") == [ADD]


@pytest.mark.parametrize("between", ["\n", "; ", ", ", " "])
def test_several_bare_calls(between):
    assert find_calls(f"{ADDING}{between}{ADDING}", "json") == [ADD, ADD]
    assert find_calls(f"[{ADDING}, {ADDING}]", "json") == [ADD, ADD]


@pytest.mark.parametrize("said", ["4", "The set {1, 2}", '{"answer": 4}', "{}", "", "[1, 2]"])
def test_no_bare_call(said):
    assert find_calls(said, "json") == []


def test_a_malformed_bare_call():
    [found] = find_calls('{"name": "add", "arguments": {"a": 1', "json")

    assert found.problem == "the tool call is no JSON: Expecting ',' delimiter (character 36)"
