"""A user's environment at work, in its own process: made in either style, called in either style, answers made plain.

A method that is no coroutine is called outside of any event loop where the caller allows it, so that it may run one.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from rlhf_core.agents.environment.answers import plain_reset, plain_step
from rlhf_core.agents.environment.base import awaited
from rlhf_core.agents.environment.sampling import TurnSampling
from rlhf_core.errors import AgentError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping


class Instance:
    """The methods that executors call: JSON in, JSON (bytes allowed) or an awaitable of it out."""

    def __init__(self, agent: type[Any], args: Mapping[str, Any]) -> None:
        self._class = agent
        self._args = args
        self._agent: Any = None

    def reset(self, payload: dict[str, Any]) -> Any:
        """Make the agent, and reset it."""
        made = make(self._class, self._args)
        if inspect.isawaitable(made):
            return self._reset_when(made, payload)
        self._agent = made
        return then(plain_reset, self._method("reset")(payload))

    def step(self, payload: dict[str, Any]) -> Any:
        """One step."""
        states = payload | {"sampling_params": TurnSampling(**payload["sampling_params"])}
        return then(plain_step, self._method("step")(states))

    def close(self, payload: dict[str, Any]) -> Any:
        """Let the agent close, if it was made and cares."""
        if callable(close := getattr(self._agent, "close", None)):
            return then(lambda _: None, close())
        return None

    async def _reset_when(self, made: Awaitable[Any], payload: dict[str, Any]) -> Any:
        self._agent = await made
        return plain_reset(await awaited(self._method("reset")(payload)))

    def _method(self, name: str) -> Any:
        method = getattr(self._agent, name, None)
        if not callable(method):
            raise AgentError(f"{self._class.__name__} has no {name}(states)")
        return method


def make(agent: type[Any], args: Mapping[str, Any]) -> Any:
    """An instance of a user's class; an awaitable of one whose ``__init__`` is ``async``, which Python does not allow."""
    try:
        inspect.signature(agent.__init__).bind(None, **args)
    except TypeError as error:
        raise AgentError(f"{agent.__name__} cannot be made with agent.args={dict(args)}: {error}") from error
    return _made_when(agent, args) if inspect.iscoroutinefunction(agent.__init__) else agent(**args)


async def _made_when(agent: type[Any], args: Mapping[str, Any]) -> Any:
    made: Any = object.__new__(agent)
    await made.__init__(**args)
    return made


def then(read: Callable[[Any], Any], answer: Any) -> Any:
    """``read(answer)``; an awaitable of it where the answer is one."""
    return _then(read, answer) if inspect.isawaitable(answer) else read(answer)


async def _then(read: Callable[[Any], Any], answer: Awaitable[Any]) -> Any:
    return read(await answer)


def called_with(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the offered arguments that a function names; all of them if it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return dict(offered)
    return {parameter.name: offered[parameter.name] for parameter in parameters if parameter.name in offered}
