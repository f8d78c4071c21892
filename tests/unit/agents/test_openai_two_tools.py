"""The example agent with two tools, over a client that follows a script."""

import json
from types import SimpleNamespace

import pytest
from openai import APIStatusError
from openai.types.chat import ChatCompletionMessage

from rlhf_core.user_file import object_from_file

pytestmark = pytest.mark.agents

FILE = "configs/agents/openai_two_tools.py"


def named(name):
    return object_from_file("test", f"{FILE}:{name}")


def calls(*asked):
    """A reply with tool calls: (name, arguments)."""
    tools = [
        {"id": f"call-{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(asked)
    ]
    return ChatCompletionMessage.model_validate({"role": "assistant", "content": None, "tool_calls": tools})


def says(text):
    return ChatCompletionMessage(role="assistant", content=text)


def used_up():
    request = SimpleNamespace()
    return APIStatusError("used up", response=SimpleNamespace(request=request, status_code=429, headers={}), body=None)


class Client:
    """Replies call by call."""

    def __init__(self, *script):
        self.script, self.asked = list(script), []
        self.chat = SimpleNamespace(completions=self)

    async def create(self, *, model, messages, tools):
        self.asked.append(json.loads(json.dumps(messages)))
        reply = self.script.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return SimpleNamespace(choices=[SimpleNamespace(message=reply)])


async def play(*script, **args):
    client = Client(*script)
    return await named("run_agent")("What do 3 apples and 2 pears cost?", 13, client, **args), client


async def test_tools_lead_to_the_answer():
    said, client = await play(
        calls(("lookup", '{"fruit": "apples"}'), ("lookup", '{"fruit": "Pear"}')),
        calls(("calculate", '{"expression": "3*3 + 2*2"}')),
        says("It is 13."),
    )

    assert said == {"reward": 1.0, "scores": 1.0, "extra_logs": {"tools_used": 3, "tools_failed": 0}}
    results = [message["content"] for message in client.asked[-1] if message["role"] == "tool"]
    assert results == ["3", "2", "13"]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("lookup", "{"),
        ("lookup", "[]"),
        ("lookup", '"apple"'),
        ("lookup", '{"fruit": "stone"}'),
        ("calculate", '{"expression": "__import__(1)"}'),
        ("calculate", '{"expression": "1 +"}'),
        ("calculate", '{"expression": "9**9**9"}'),
        ("calculate", "{}"),
        ("fetch", "{}"),
        ("calculate", json.dumps({"expression": "(" * 5000})),
    ],
)
async def test_what_it_says_wrong_is_told_to_it(name, arguments):
    said, client = await play(calls((name, arguments)), says("13"))

    assert said["extra_logs"] == {"tools_used": 1, "tools_failed": 1}
    assert name in client.asked[-1][-1]["content"]


async def test_a_used_up_budget_ends_the_episode():
    said, _ = await play(calls(("lookup", "{}")), used_up())

    assert said["reward"] == 0.0


async def test_a_first_call_that_fails_is_an_error():
    with pytest.raises(APIStatusError):
        await play(used_up())


async def test_digits_are_worth_something_where_asked():
    said, _ = await play(says("42ab"), digits_weight=0.5)

    assert (said["reward"], said["scores"]) == (0.25, 0.0)


def test_every_question_has_its_answer():
    rows = list(named("purchases")(count=1215))

    assert len({row["input"] for row in rows}) == 1215
    assert {"input": "What do 3 apples and 2 pears cost?", "label": 13} in rows
