"""An agent as a program: ``agent.command``, started once an episode.

It finds ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` in its environment, which every OpenAI client reads by itself, and the
task on stdin, as one JSON document: ``{"session_id", "base_url", "api_key", "prompt", "label", "messages", "seed"}``. The
reward is the last line that it prints, where that is a JSON object with ``reward``.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rlhf_core.agents.openai.answer import AgentAnswer, to_answer
from rlhf_core.agents.openai.program import run_program, shown
from rlhf_core.errors import AgentError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlhf_core.agents.openai.task import AgentTask
    from rlhf_core.records import Session

KEY = "OPENAI_API_KEY"


class CommandAgent:
    """``AgentRunner`` over a program."""

    def __init__(self, command: Sequence[str]) -> None:
        """``ConfigError`` if there is no such program."""
        if shutil.which(command[0]) is None:
            raise ConfigError(
                f"agent.command={list(command)}: there is no program {command[0]!r} that can be started: name its path, or "
                "put it into PATH; a relative path starts in the folder of the controller"
            )
        self._command = list(command)

    async def run(self, task: AgentTask, seconds: float) -> AgentAnswer:
        """See ``AgentRunner``."""
        document = json.dumps(task.document()).encode()
        environment = agent_environment(os.environ, task.session)
        ended = await run_program(self._command, environment, document, KEY, seconds)
        if ended.code != 0:
            raise AgentError(f"agent.command {ended.how}{shown(ended.stderr)}")
        return printed_answer(ended.stdout)

    async def close(self) -> None:
        """Nothing outlives an episode."""


def agent_environment(environment: Mapping[str, str], session: Session) -> dict[str, str]:
    """This process's environment, with the way to the session. No proxy stands between the agent and its server."""
    host = urlsplit(session.base_url).hostname or ""
    direct = [*filter(None, [environment.get("no_proxy") or environment.get("NO_PROXY")]), host]
    return {
        **environment,
        "OPENAI_BASE_URL": session.base_url,
        KEY: session.api_key,
        "NO_PROXY": ",".join(direct),
        "no_proxy": ",".join(direct),
    }


def printed_answer(stdout: bytes) -> AgentAnswer:
    """What the last printed line says of the reward; nothing where it is no JSON object with one.

    Raises:
        AgentError: the reward in it is no number.
    """
    lines = stdout.decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    try:
        said = json.loads(last)
    except (ValueError, RecursionError):
        return AgentAnswer()
    if not isinstance(said, dict) or not {"reward", "rewards"} & said.keys():
        return AgentAnswer()
    return to_answer(said, "agent.command")
