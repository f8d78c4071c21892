"""The tools of a run: made from the configuration, called by the policy, each result a short text.

::

    agent.tools ──▶ Toolbox ── schemas ──▶ chat template
                       └── answer(call) ──▶ what the tool returned, or what was wrong: in words, never an exception
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from rlhf_core.agents.tools.sandbox import SandboxLimits, check_sandbox, run_python
from rlhf_core.agents.tools.schema import Tool, make_tool
from rlhf_core.errors import AgentError, ConfigError
from rlhf_core.user_file import object_from_file

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rlhf_core.agents.tools.calls import ToolCall
    from rlhf_core.config.model import AgentConfig

PYTHON = "python"
MAX_ERROR = 300  # characters of an error of a tool that the policy is told
NOTHING = "(no output)"


@dataclass(frozen=True, slots=True)
class Answer:
    """What the policy is told of one call."""

    text: str
    failed: bool


class ToolFailedError(Exception):
    """The tool ran, and its answer is a failure; the text is all there is to say."""


class Toolbox:
    """The tools of ``agent.tools``."""

    def __init__(self, tools: Sequence[Tool], *, timeout: float, result_chars: int) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._timeout = timeout
        self._result_chars = result_chars

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """As chat templates want them."""
        return [tool.schema for tool in self._tools.values()]

    async def answer(self, call: ToolCall) -> Answer:
        """Run a call. Whatever goes wrong by the policy's doing or in the tool is the answer.

        Raises:
            AgentError: the sandbox is broken.
        """
        if call.problem:
            return Answer(f"Error: {call.problem}", failed=True)
        tool = self._tools.get(call.name)
        if tool is None:
            return Answer(f"Error: there is no tool {call.name[:64]!r}; use {', '.join(self._tools)}", failed=True)
        arguments, problem = tool.problems(call.arguments)
        if problem:
            return Answer(f"Error: wrong arguments for {tool.name}: {shortened(problem, MAX_ERROR)}", failed=True)
        try:
            result = as_text(await _called(tool, arguments, self._timeout))
        except AgentError:
            raise
        except ToolFailedError as failure:
            return Answer(shortened(str(failure), self._result_chars), failed=True)
        except TimeoutError:
            return Answer(f"Error: {tool.name} did not answer within {self._timeout:g} s", failed=True)
        except (Exception, SystemExit) as error:  # noqa: BLE001  the policy chose the arguments: what they do is its answer
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            return Answer(f"Error: {shortened(text, MAX_ERROR)}", failed=True)
        return Answer(shortened(result, self._result_chars), failed=False)


def make_toolbox(agent: AgentConfig) -> Toolbox:
    """The tools that the configuration names.

    Raises:
        ConfigError: one of them cannot be used, or two have one name.
    """
    tools = [_tool(entry, agent) for entry in agent.tools]
    for index, tool in enumerate(tools):
        if tool.name in [other.name for other in tools[:index]]:
            raise ConfigError(f"agent.tools names two tools called {tool.name!r}: rename one of the functions")
    return Toolbox(tools, timeout=agent.tool_timeout, result_chars=agent.tool_result_chars)


def check_machine(agent: AgentConfig) -> None:
    """Make sure that this machine can run the tools.

    Raises:
        ConfigError: it cannot.
    """
    if PYTHON in agent.tools:
        check_sandbox(_limits(agent))


def as_text(result: Any) -> str:
    """A tool's result as the policy reads it: text as it is, anything else as JSON."""
    text = result if isinstance(result, str) else to_json(result, fallback=repr, inf_nan_mode="constants").decode()
    return text if text.strip() else NOTHING


def shortened(text: str, limit: int) -> str:
    """At most about ``limit`` characters: of a longer text the beginning and the end, and how much is missing."""
    if len(text) <= limit:
        return text
    head = (limit + 1) // 2
    tail = limit - head
    return f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{text[len(text) - tail :]}"


def _tool(entry: str, agent: AgentConfig) -> Tool:
    if entry == PYTHON:
        return make_tool(_python_tool(_limits(agent)), "agent.tools", limits_itself=True)
    return make_tool(object_from_file("agent.tools", entry), f"agent.tools={entry!r}")


def _limits(agent: AgentConfig) -> SandboxLimits:
    sandbox = agent.sandbox
    return SandboxLimits(
        seconds=agent.tool_timeout,
        memory_mib=sandbox.memory_mib,
        disk_mib=sandbox.disk_mib,
        packages=sandbox.packages,
        open_files=sandbox.open_files,
    )


def _python_tool(limits: SandboxLimits) -> Callable[[str], str]:
    def python(code: str) -> str:
        """Run a Python program. Returns what it prints and the value of its last line.

        Each call starts anew: variables are not kept. There is no network.

        Args:
            code: The program.
        """
        result = run_python(code, limits)
        if result.failed:
            raise ToolFailedError(result.output or "the program ended with an error")
        return result.output

    return python


async def _called(tool: Tool, arguments: dict[str, Any], seconds: float) -> Any:
    if inspect.iscoroutinefunction(tool.function):
        return await asyncio.wait_for(tool.function(**arguments), seconds)
    result = _in_thread(lambda: tool.function(**arguments))
    return await (result if tool.limits_itself else asyncio.wait_for(result, seconds))


def _in_thread(function: Callable[[], Any]) -> asyncio.Future[Any]:
    """The result of a function that runs in a thread of its own: one that hangs holds up nothing, not even the exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def work() -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = (function(), None)
        except (Exception, SystemExit) as error:  # noqa: BLE001  carried to whoever waits
            outcome = (None, RuntimeError("StopIteration") if isinstance(error, StopIteration) else error)
        loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=work, name="tool", daemon=True).start()
    return future
