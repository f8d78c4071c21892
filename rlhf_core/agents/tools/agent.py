"""The environment of a policy that calls tools.

::

    the policy's turn ──find_calls──▶ calls ──Toolbox──▶ one tool message a call ──▶ the policy's next turn
                           └── none: this turn is the answer, the episode is done; the reward section judges it
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_core.agents.environment.base import AgentInstanceBase
from rlhf_core.agents.environment.instance import Instance
from rlhf_core.agents.tools.calls import find_calls
from rlhf_core.agents.tools.toolbox import check_machine

if TYPE_CHECKING:
    from rlhf_core.agents.tools.calls import ToolCall
    from rlhf_core.agents.tools.toolbox import Toolbox
    from rlhf_core.config.model import AgentConfig

MAX_NAME = 64  # characters of a name that the policy made up


def writable(text: str) -> str:
    """The text without half characters, which JSON escapes can name, and no tokenizer takes."""
    return text.encode(errors="replace").decode()


class ToolAgent(AgentInstanceBase):
    """Runs the policy's tool calls until it makes none."""

    def __init__(self, tools: Toolbox, tool_format: str, max_calls: int) -> None:
        """``tool_format``, ``max_calls`` of one turn: see ``agent.tool_format``, ``agent.tool_max_calls``."""
        self._tools = tools
        self._format = tool_format
        self._max_calls = max_calls
        self._calls = self._failed = 0

    async def step(self, states: dict[str, Any]) -> dict[str, Any]:
        """See the base class."""
        calls = find_calls(states["action_text"], self._format)
        if not calls:
            return {"done": True, "extra_logs": self._logs}
        most = self._max_calls
        messages = [await self._message(call) for call in calls[:most]]
        if (beyond := len(calls) - most) > 0:
            self._failed += beyond
            self._calls += beyond
            messages[-1]["content"] += f"\nError: {beyond} more calls were not run; at most {most} in one turn"
        return {"environment_feedback": messages, "done": False, "extra_logs": self._logs}

    async def _message(self, call: ToolCall) -> dict[str, Any]:
        call_id = f"call{self._calls:05d}"  # nine letters and digits, as the strictest chat templates want them
        answer = await self._tools.answer(call)
        self._calls += 1
        self._failed += answer.failed
        name = writable(call.name[:MAX_NAME]) or "unknown"
        return {"role": "tool", "tool_call_id": call_id, "name": name, "content": writable(answer.text)}

    @property
    def _logs(self) -> dict[str, float]:
        """Of the episode so far."""
        return {"tool_calls": self._calls, "tool_calls_failed": self._failed}


class ToolInstance(Instance):
    """The tool loop, as executors call it."""

    def __init__(self, agent: AgentConfig, tools: Toolbox) -> None:
        """``tools``: of ``agent``; made once, shared by all episodes."""
        arguments = {"tools": tools, "tool_format": agent.tool_format, "max_calls": agent.tool_max_calls}
        super().__init__(ToolAgent, arguments)
        self._config = agent
        self._tools = tools

    async def look(self, payload: dict[str, Any]) -> dict[str, Any]:
        """The schemas of the tools, once it is sure that this machine can run them.

        Raises:
            ConfigError: it cannot.
        """
        check_machine(self._config)
        return {"schemas": self._tools.schemas}
