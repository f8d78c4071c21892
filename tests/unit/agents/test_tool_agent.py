"""The tool loop: answers to calls, and whole episodes in real processes."""

import asyncio
import json
import textwrap
import time
from contextlib import asynccontextmanager

import pytest
from turn_script import CLOSE, Speaks, chat, ids, tokenizer, turns_episode, user

from rlhf_core.agents import MultiTurnAgentExecutor
from rlhf_core.agents.environment.pool import EnvironmentPool
from rlhf_core.agents.loading import load_agent
from rlhf_core.agents.tools.calls import ToolCall
from rlhf_core.agents.tools.schema import make_tool
from rlhf_core.agents.tools.toolbox import NOTHING, Toolbox, as_text, make_toolbox, shortened
from rlhf_core.config import load_config
from rlhf_core.config.model import AgentConfig
from rlhf_core.errors import ConfigError
from rlhf_core.lineage.user_code import user_code
from rlhf_core.records import StopReason

pytestmark = pytest.mark.agents

CALCULATOR = "configs/agents/calculator.py:calculator"


def write_tool(folder, body, name="tool.py"):
    path = folder / name
    path.write_text(textwrap.dedent(body))
    return str(path)


def toolbox_of(*functions, timeout=5, result_chars=200):
    tools = [make_tool(function, "agent.tools") for function in functions]
    return Toolbox(tools, timeout=timeout, result_chars=result_chars)


def echo(value: dict | list | str | int | float | None) -> object:
    """Give the value back.

    Args:
        value: Any.
    """
    return value


def fail(how: str) -> None:
    """Fail.

    Args:
        how: In which way.
    """
    if how == "exit":
        raise SystemExit(3)
    if how == "stop":
        raise StopIteration
    if how == "bare":
        raise KeyError
    raise ValueError(how)


def sleep(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "awake"


async def sleep_async(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "awake"


# --- one call --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "text", "failed"),
    [
        (ToolCall("echo", {"value": "hi"}), "hi", False),
        (ToolCall("echo", {"value": {"a": [1, 2.5, None]}}), '{"a":[1,2.5,null]}', False),
        (ToolCall("echo", {"value": " "}), NOTHING, False),
        (ToolCall("echo", {"value": None}), "null", False),
        (ToolCall("fail", {"how": "so"}), "Error: ValueError: so", True),
        (ToolCall("fail", {"how": "exit"}), "Error: SystemExit: 3", True),
        (ToolCall("fail", {"how": "stop"}), "Error: RuntimeError: StopIteration", True),
        (ToolCall("fail", {"how": "bare"}), "Error: KeyError", True),
        (ToolCall("ecco", {}), "Error: there is no tool 'ecco'; use echo, fail, sleep, sleep_async", True),
        (ToolCall("echo", {}), "Error: wrong arguments for echo: value: Field required", True),
        (ToolCall("echo", {}, problem="it is no JSON"), "Error: it is no JSON", True),
        (ToolCall("sleep", {"seconds": 0}), "awake", False),
        (ToolCall("sleep_async", {"seconds": 0}), "awake", False),
    ],
)
async def test_every_call_has_an_answer(call, text, failed):
    answer = await toolbox_of(echo, fail, sleep, sleep_async).answer(call)

    assert (answer.text, answer.failed) == (text, failed)


@pytest.mark.parametrize("name", ["sleep", "sleep_async"])
async def test_a_tool_that_hangs_is_given_up(name):
    answer = await toolbox_of(sleep, sleep_async, timeout=0.2).answer(ToolCall(name, {"seconds": 3}))

    assert answer.text == f"Error: {name} did not answer within 0.2 s"


async def test_a_long_result_is_cut_in_the_middle():
    answer = await toolbox_of(echo, result_chars=10).answer(ToolCall("echo", {"value": "0123456789abcdefghij"}))

    assert answer.text == "01234\n[... 10 characters left out ...]\nfghij"


@pytest.mark.parametrize(
    ("text", "limit", "cut"), [("abc", 3, "abc"), ("abcd", 3, "ab\n[... 1 characters left out ...]\nd")]
)
def test_shortened(text, limit, cut):
    assert shortened(text, limit) == cut


def test_results_that_json_does_not_know():
    assert as_text(float("nan")) == "NaN"
    assert as_text({"a": object}) == '{"a":"<class \'object\'>"}'


# --- the configuration -----------------------------------------------------------------------------------------------


def test_the_schemas_of_the_configuration():
    schemas = make_toolbox(AgentConfig(tools=("python", CALCULATOR))).schemas

    assert [schema["function"]["name"] for schema in schemas] == ["python", "calculator"]
    assert schemas[0]["function"]["parameters"]["required"] == ["code"]


def test_two_tools_of_one_name_are_refused(tmp_path):
    body = '''
        def calculator(a: int):
            """Do.

            Args:
                a: This.
            """
        '''
    with pytest.raises(ConfigError, match="agent.tools names two tools called 'calculator'"):
        make_toolbox(AgentConfig(tools=(CALCULATOR, f"{write_tool(tmp_path, body)}:calculator")))


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("nowhere.py:add", "agent.tools='nowhere.py:add': no such file"),
        ("configs/agents/calculator.py:nothing", "nothing in .*calculator.py is called 'nothing'"),
        ("configs/agents/calculator.py:MAX_BITS", "4096 is no function"),
        ("configs/agents/calculator.py:_bits", "the tool _bits has no docstring"),
    ],
)
def test_a_tool_that_cannot_be_used_is_refused(entry, reason):
    with pytest.raises(ConfigError, match=reason):
        make_toolbox(AgentConfig(tools=(entry,)))


# --- whole episodes, with a process for each -------------------------------------------------------------------------


@asynccontextmanager
async def tools_in_processes(**keys):
    agent = AgentConfig(**keys)
    pool = EnvironmentPool(
        "rlhf_core.agents.entries:tools", {"agent": agent.model_dump(mode="json")}, max_processes=4, step_timeout=30
    )
    try:
        yield MultiTurnAgentExecutor(pool)
    finally:
        await pool.close()


def calling(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>{CLOSE}"


def said_by_tools(row):
    """The texts between the actions."""
    ends = [end for _, end in row.action_ranges[:-1]]
    starts = [start for start, _ in row.action_ranges[1:]]
    return [tokenizer().decode(row.token_ids[a:b].tolist()) for a, b in zip(ends, starts, strict=True)]


def between(*texts):
    tools = "".join(f"<|im_start|>tool\n{text}{CLOSE}\n" for text in texts)
    return f"\n{tools}<|im_start|>assistant\n"


async def test_a_calculator_is_called_until_the_policy_answers():
    policy = Speaks(calling("calculator", expression="17 * 3"), calling("calculator", expression="1/0"), f"51{CLOSE}")

    async with tools_in_processes(tools=(CALCULATOR,)) as executor:
        [row] = await executor.execute(turns_episode(policy, chat(user("17 * 3?")), total=400, turn=200, max_len=900))

    assert said_by_tools(row) == [between("51"), between("Error: ZeroDivisionError: division by zero")]
    assert (row.stop_reason, row.answer, row.reward, row.step_rewards) == (StopReason.DONE, "51", None, ())
    assert row.metrics["agent/tool_calls"] == 2
    assert row.metrics["agent/tool_calls_failed"] == 1
    spoken = [tokenizer().decode(row.token_ids[start:end].tolist()) for start, end in row.action_ranges]
    assert spoken == [calling("calculator", expression="17 * 3"), calling("calculator", expression="1/0"), f"51{CLOSE}"]


async def test_python_and_several_calls_in_a_turn():
    """Two calls that run, one that is malformed, and two that are too many; then half a character, which nobody can write."""
    run = calling("python", code="print(2**10)").removesuffix(CLOSE)
    policy = Speaks(
        run + calling("python", code="1/0").removesuffix(CLOSE) + "<tool_call>oops</tool_call>" + run + run + CLOSE,
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>' + CLOSE,
        f"done{CLOSE}",
    )
    async with tools_in_processes(tools=("python",), tool_max_calls=3) as executor:
        [row] = await executor.execute(turns_episode(policy, chat(user("hi")), total=2000, turn=1000, max_len=3000))

    first, second = said_by_tools(row)
    trace = 'Traceback (most recent call last):\n  File "<python>", line 1, in <module>\n    1/0\n    ~^~\n'
    assert first == between(
        "1024",
        f"{trace}ZeroDivisionError: division by zero",
        "Error: the tool call is no JSON: Expecting value (character 0)\n"
        "Error: 2 more calls were not run; at most 3 in one turn",
    )
    assert second == between("Error: there is no tool '\\ud800'; use python")
    assert (row.metrics["agent/tool_calls"], row.metrics["agent/tool_calls_failed"]) == (6, 5)


async def test_bare_json_calls():
    policy = Speaks('{"name": "calculator", "parameters": {"expression": "6 * 7"}}' + CLOSE, f"42{CLOSE}")

    async with tools_in_processes(tools=(CALCULATOR,), tool_format="json") as executor:
        [row] = await executor.execute(turns_episode(policy, chat(user("6 * 7?")), max_len=900))

    assert said_by_tools(row) == [between("42")]


async def test_a_tool_of_the_users_own_keeps_its_state_within_an_episode_only(tmp_path):
    body = '''
        count = 0

        async def tick() -> int:
            """Count."""
            global count
            count += 1
            return count
        '''
    entry = f"{write_tool(tmp_path, body)}:tick"
    async with tools_in_processes(tools=(entry,)) as executor:
        rows = [
            row
            for _ in range(2)
            for row in await executor.execute(
                turns_episode(Speaks(calling("tick"), calling("tick"), f"2{CLOSE}"), chat(user("hi")), max_len=900)
            )
        ]

    assert [said_by_tools(row) for row in rows] == [[between("1"), between("2")]] * 2


async def test_the_chat_template_is_told_of_the_tools():
    """What the policy reads first; that the prompts are rendered so is tested with the data."""
    [schema] = make_toolbox(AgentConfig(tools=(CALCULATOR,))).schemas

    text = tokenizer().apply_chat_template([user("hi")], tools=[schema], tokenize=False)

    assert '"name": "calculator"' in text
    assert len(ids(text)) < 500


# --- as a run loads it -----------------------------------------------------------------------------------------------


async def test_a_run_learns_the_schemas_from_the_process_that_runs_the_tools():
    agent = await load_agent(load_config("calculator_tiny_cpu"), {})
    try:
        [schema] = agent.tools
        assert schema["function"]["name"] == "calculator"
        assert isinstance(agent.executor, MultiTurnAgentExecutor)
    finally:
        await agent.close()


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("agent.tools=configs/agents/calculator.py:_bits", "the tool _bits has no docstring: say in it"),
        ("agent.tools=nowhere.py:add", "agent.tools='nowhere.py:add': no such file"),
        (
            "agent.tools=python agent.tool_timeout=0.000001",
            "agent.tool_timeout=1e-06 it cannot compute 6 .* raise them",
        ),
    ],
)
async def test_a_run_whose_tools_cannot_work_does_not_start(override, reason):
    with pytest.raises(ConfigError, match=reason):
        await load_agent(load_config("calculator_tiny_cpu", override.split()), {})


def test_the_file_of_a_tool_is_part_of_the_lineage():
    config = load_config("calculator_tiny_cpu").model_dump(mode="json")

    assert "configs/agents/calculator.py" in user_code(config)
