"""What a user's agent file holds, found by looking: in a process that may import it, never in one of the run's own."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.agents.executor import AgentExecutorBase
from rlhf_core.agents.multi_turn.executor import MultiTurnAgentExecutor
from rlhf_core.agents.openrlhf.process import make_executor
from rlhf_core.errors import ConfigError
from rlhf_core.user_file import describe, module_from_file

if TYPE_CHECKING:
    from types import ModuleType

KEY = "train.agent_func_path"
EXECUTOR, INSTANCE, FUNCTION = "AgentExecutor", "AgentInstance", "run_agent"
WANTED = (
    f"a class {INSTANCE} with reset(states) and step(states), a class {EXECUTOR} (as in OpenRLHF), or a function "
    f"{FUNCTION}(prompt, label, client)"
)
OURS = (AgentExecutorBase.execute, MultiTurnAgentExecutor.execute)


class AgentKind(StrEnum):
    """What plays the episodes of a file."""

    ENVIRONMENT = "environment"  # reset and step, in turns with the policy
    EXECUTOR = "executor"  # execute, which asks the engine by itself
    FUNCTION = "function"  # run_agent, which speaks to the policy through an OpenAI client


@dataclass(frozen=True, slots=True)
class FoundAgent:
    """What the file holds."""

    kind: AgentKind
    what: Any  # the AgentInstance class, the AgentExecutor class, or the function


def find_agent(file: str) -> FoundAgent:
    """Import a file, and look.

    Raises:
        ConfigError: it cannot be imported, holds no agent or several; the message lists what it holds.
    """
    place = f"{KEY}={file!r}"
    module = module_from_file(Path(file).expanduser().resolve(), place)
    executor, instance, function = (vars(module).get(name) for name in (EXECUTOR, INSTANCE, FUNCTION))
    if (executor is not None or instance is not None) and function is not None:
        other = EXECUTOR if executor is not None else INSTANCE
        raise ConfigError(f"{place}: the file holds both {other} and {FUNCTION}: keep one of them")
    if executor is not None:
        return _of_executor(executor, instance, place)
    if instance is not None:
        return _of_instance(instance, place)
    if function is not None:
        if not callable(function):
            raise ConfigError(f"{place}: {FUNCTION} is of type {type(function).__name__}, not a function")
        return FoundAgent(AgentKind.FUNCTION, function)
    raise ConfigError(f"{place}: the file holds no agent, only {_listed(module)}: it needs {WANTED}")


def _of_executor(executor: Any, instance: Any, place: str) -> FoundAgent:
    if not inspect.isclass(executor) or not issubclass(executor, AgentExecutorBase):
        raise ConfigError(
            f"{place}: {EXECUTOR} is no class over AgentExecutorBase or MultiTurnAgentExecutor: import these from "
            "rlhf_core.agents"
        )
    if executor.execute not in OURS:
        parameters = inspect.signature(executor.execute).parameters
        if "prompt" not in parameters and not _takes_all(executor.execute):
            raise ConfigError(
                f"{place}: {EXECUTOR}.execute takes ({', '.join(list(parameters)[1:])}): it needs prompt, label, "
                "sampling_params, max_length, hf_tokenizer, llm_engine, as in OpenRLHF"
            )
        return FoundAgent(AgentKind.EXECUTOR, executor)
    offered = dict.fromkeys(("max_steps", "max_length", "llm_engine", "hf_tokenizer"))
    try:
        given = make_executor(executor, offered).agent_instance_cls
    except Exception as error:
        raise ConfigError(f"{place}: {EXECUTOR} cannot be made: {describe(error)}") from error
    return _of_instance(given or instance, place)


def _of_instance(instance: Any, place: str) -> FoundAgent:
    if not inspect.isclass(instance):
        raise ConfigError(f"{place}: {INSTANCE} is of type {type(instance).__name__}, not a class")
    missing = [name for name in ("reset", "step") if not callable(getattr(instance, name, None))]
    if missing:
        raise ConfigError(f"{place}: {instance.__name__} has no {' and no '.join(missing)}: it needs both")
    return FoundAgent(AgentKind.ENVIRONMENT, instance)


def _takes_all(function: Any) -> bool:
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def _listed(module: ModuleType) -> str:
    """The names that the file itself defines."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return ", ".join(own) or "nothing of its own"
