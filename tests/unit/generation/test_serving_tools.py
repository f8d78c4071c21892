"""Tool calls through the server: what the client does to their JSON must not break the row."""

import json

import pytest

pytestmark = pytest.mark.agents

EOS = 258
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
ODD = '<tool_call>\n{"name":  "weather", "arguments":{"city":   "Rome"}}\n</tool_call>'
TWO = ODD + '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ARGUMENTS_FIRST = '<tool_call>\n{"arguments": {"city":  "Oslo"}, "name": "weather"}\n</tool_call>'


@pytest.fixture
async def server(rig):
    async with rig.server(chat_template=TEMPLATE) as server:
        yield server
    rig.core.reset()


def user(text):
    return {"role": "user", "content": text}


def results(message):
    return [{"role": "tool", "tool_call_id": c["id"], "content": "sunny"} for c in message["tool_calls"]]


def dumped(answer):
    return answer.choices[0].message.model_dump(exclude_none=True)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("reply", "calls"), [(ODD, 1), (TWO, 2), ("Let me see. " + ODD, 1)])
async def test_calls_and_results_stay_in_one_row(rig, server, playing, reply, calls, streamed) -> None:
    rig.script(reply, "It is sunny.")
    async with playing(server) as play:
        ask = play.streamed if streamed else play.chat
        first = await ask([user("weather?")], tools=TOOLS)
        first = first if streamed else dumped(first)
        await ask([user("weather?"), first, *results(first)], tools=TOOLS)
        record, [row] = await play.rows()

    assert next(json.loads(c["function"]["arguments"]) for c in first["tool_calls"]) == {"city": "Rome"}
    assert len(first["tool_calls"]) == calls
    assert [call.constrained for call in record.calls] == [False, False]
    assert bytes(record.calls[0].token_ids[:-1]).decode() == reply
    assert len(row.action_ranges) == 2


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_that_the_parser_reads_badly_stays_in_the_row(rig, server, playing, streamed) -> None:
    """vLLM streams broken arguments where the key ``arguments`` comes first: the row has what was sampled."""
    rig.script(ARGUMENTS_FIRST, "ok")
    async with playing(server) as play:
        first = await (play.streamed if streamed else play.chat)([user("?")], tools=TOOLS)
        first = first if streamed else dumped(first)
        await play.chat([user("?"), first, *results(first)], tools=TOOLS)
        record, rows = await play.rows()

    assert len(rows) == 1
    assert bytes(record.calls[0].token_ids[:-1]).decode() == ARGUMENTS_FIRST


@pytest.mark.parametrize("content", [None, "", "left out"])
async def test_an_answer_that_is_nothing_but_a_call(rig, server, playing, content) -> None:
    rig.script(ODD, "ok")
    async with playing(server) as play:
        first = dumped(await play.chat([user("?")], tools=TOOLS))
        [call] = first["tool_calls"]
        call["function"]["arguments"] = '{ "city":"Rome" }'  # as another JSON library writes it
        message = {"role": "assistant", "tool_calls": [call]}
        if content != "left out":
            message["content"] = content
        await play.chat([user("?"), message, *results(first)], tools=TOOLS)
        _, rows = await play.rows()

    assert len(rows) == 1


async def test_another_list_of_tools_is_another_prompt(rig, server, playing) -> None:
    rig.script(ODD, "ok")
    other = [{"type": "function", "function": TOOLS[0]["function"] | {"name": "climate"}}]
    async with playing(server) as play:
        first = dumped(await play.chat([user("?")], tools=TOOLS))
        await play.chat([user("?"), first, *results(first)], tools=other)
        _, rows = await play.rows()

    assert len(rows) == 2


async def test_a_forced_tool_is_constrained(rig, server, playing) -> None:
    rig.script(ODD)
    forced = {"type": "function", "function": {"name": "weather"}}
    async with playing(server) as play:
        first = dumped(await play.chat([user("?")], tools=TOOLS, tool_choice=forced))
        record, rows = await play.rows()

    assert first["tool_calls"][0]["function"]["name"] == "weather"
    assert record.calls[0].constrained
    assert rows == []


async def test_without_a_parser_the_answer_is_text(rig, playing) -> None:
    rig.script(ODD, "ok")
    async with rig.server(chat_template=TEMPLATE, tool_parser=None) as server, playing(server) as play:
        first = dumped(await play.chat([user("?")], tools=TOOLS))
        await play.chat([user("?"), first, user("go on")], tools=TOOLS)
        _, rows = await play.rows()

    assert first["content"] == ODD
    assert len(rows) == 1


async def test_tools_of_the_responses_api(rig, server, playing) -> None:
    rig.script(TWO, "ok")
    tools = [{"type": "function", **TOOLS[0]["function"]}]
    items = [user("?")]
    async with playing(server) as play:
        first = await play.client.responses.create(model="policy", input=items, tools=tools)
        for item in first.output:
            items.append(item.model_dump(exclude_none=True))
        for item in first.output:
            items.append({"type": "function_call_output", "call_id": item.call_id, "output": "sunny"})
        await play.client.responses.create(model="policy", input=items, tools=tools)
        _, rows = await play.rows()

    assert [item.type for item in first.output] == ["function_call", "function_call"]
    assert len(rows) == 1
