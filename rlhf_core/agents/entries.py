"""What the processes of environments and agents start with: ``rlhf_core.agents.entries:NAME``.

Each function is called once in the template process, with JSON of the run's configuration, and returns the factory of the
instances: ``factory(seed)`` is called in the process of each episode. User code is imported here and nowhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_core.agents.environment.instance import Instance
from rlhf_core.agents.finding import AgentKind, FoundAgent, find_agent

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlhf_core.agents.episode import Tokenizer

    Factory = Callable[[int], Any]


def agent_file(argument: dict[str, Any]) -> Factory:
    """The agent of a file: ``{"file": path, "args": {...}, "tokenizer": {...}}``. Its ``look`` tells what it is.

    Without a tokenizer it is only to be looked at.
    """
    found, args = find_agent(argument["file"]), argument["args"]
    make = _maker(found, args, argument["tokenizer"])
    return lambda seed: _Agent(found, make())


def _maker(found: FoundAgent, args: dict[str, Any], tokenizer: dict[str, Any] | None) -> Callable[[], Any]:
    if found.kind is AgentKind.ENVIRONMENT:
        return lambda: Instance(found.what, args)
    if found.kind is AgentKind.FUNCTION:
        from rlhf_core.agents.openai.function import function_factory

        factory = function_factory(found.what, args, "train.agent_func_path")
        return lambda: factory(0)
    if tokenizer is None:
        return lambda: None
    from rlhf_core.agents.openrlhf.process import ExecutorInstance

    loaded = load_tokenizer(**tokenizer)
    return lambda: ExecutorInstance(found.what, loaded, args)


def tools(argument: dict[str, Any]) -> Factory:
    """The tool loop: ``{"agent": the section of the configuration}``."""
    from rlhf_core.agents.tools import ToolInstance, make_toolbox
    from rlhf_core.config.model import AgentConfig

    agent = AgentConfig.model_validate(argument["agent"])
    toolbox = make_toolbox(agent)
    return lambda seed: ToolInstance(agent, toolbox)


def environments(argument: dict[str, Any]) -> Factory:
    """The environments of ``env:`` datasets."""
    from rlhf_core.agents.environment.rows import EnvironmentAgent, prepare_environments

    prepare_environments(argument)
    return lambda seed: Instance(EnvironmentAgent, argument)


class _Agent:
    """An instance that also says what it is."""

    def __init__(self, found: FoundAgent, instance: Any) -> None:
        self._found = found
        self._instance = instance

    def look(self, payload: dict[str, Any]) -> dict[str, Any]:
        return {"kind": str(self._found.kind), "name": self._found.what.__name__}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._instance, name)


def load_tokenizer(name: str, trust_remote_code: bool, use_fast: bool) -> Tokenizer:
    """The policy's tokenizer, for executors that want it."""
    from transformers import AutoTokenizer

    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, use_fast=use_fast)
    return tokenizer
