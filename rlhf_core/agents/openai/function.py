"""An agent as a function: ``run_agent(prompt, label, client)`` of the user's file, in a process of its own.

``client`` is an ``openai.AsyncOpenAI`` where the function is ``async``, else an ``openai.OpenAI``, bound to the episode's
session. A function that names them also gets ``messages`` (the prompt as chat messages) and ``seed``, and every function
gets ``agent.args``. Frameworks that make a client of their own find the session in the environment.
"""

from __future__ import annotations

import inspect
import os
import ssl
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rlhf_core.agents.openai.answer import AgentAnswer, to_answer
from rlhf_core.agents.openai.command import agent_environment
from rlhf_core.agents.openai.task import AgentTask
from rlhf_core.errors import ConfigError
from rlhf_core.records import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from openai import AsyncOpenAI, OpenAI

    from rlhf_core.agents.environment.base import EnvironmentSource

RUN_AGENT = "run_agent"
OFFERED = ("messages", "seed")  # passed to a function that names them
MAX_RETRIES = 2  # of a call whose connection broke; the server says of its refusals that they are final
CONNECT_SECONDS = 30.0  # hundreds of agents that start together wait for each other


class FunctionAgent:
    """``AgentRunner`` over a function in processes of a pool, one process an episode."""

    def __init__(self, source: EnvironmentSource) -> None:
        """``source``: of ``FunctionInstance`` objects, with calls as long as an episode may be."""
        self._source = source

    async def run(self, task: AgentTask, seconds: float) -> AgentAnswer:
        """See ``AgentRunner``. The pool ends what takes longer than its own limit, which is that of an episode."""
        async with self._source.open(task.seed or 0) as process:
            said = await process.call("run", task.document() | {"seconds": seconds})
        return AgentAnswer(**said)

    async def close(self) -> None:
        """The pool belongs to whoever made it."""


class FunctionInstance:
    """The function at work, in its own process: JSON in, JSON out."""

    def __init__(self, function: Callable[..., Any], args: Mapping[str, Any]) -> None:
        self._function = function
        self._args = args

    def run(self, payload: dict[str, Any]) -> Any:
        """Play one episode; a coroutine where the function is one.

        Args:
            payload: ``AgentTask.document()``, and ``seconds``: how long one call may take.

        Returns:
            The fields of an ``AgentAnswer``.

        Raises:
            AgentError: the function answered what is no reward. What it raises is raised.
        """
        task = AgentTask(
            session=Session(payload["session_id"], payload["base_url"], payload["api_key"]),
            prompt=payload["prompt"],
            label=payload["label"],
            messages=payload["messages"],
            seed=payload["seed"],
        )
        os.environ.update(agent_environment(os.environ, task.session))
        play = self._play_async if is_async(self._function) else self._play
        return play(task, keywords_for(self._function, task, self._args), payload["seconds"])

    def _play(self, task: AgentTask, keywords: dict[str, Any], seconds: float) -> dict[str, Any]:
        with make_client(task.session, seconds) as client:
            return asdict(to_answer(self._function(task.prompt, task.label, client, **keywords), RUN_AGENT))

    async def _play_async(self, task: AgentTask, keywords: dict[str, Any], seconds: float) -> dict[str, Any]:
        async with make_async_client(task.session, seconds) as client:
            return asdict(to_answer(await self._function(task.prompt, task.label, client, **keywords), RUN_AGENT))


def function_factory(
    function: Callable[..., Any], args: Mapping[str, Any], place: str
) -> Callable[[int], FunctionInstance]:
    """The factory of a pool's instances; imports the client, once for all episodes.

    Args:
        function: ``run_agent``.
        args: ``agent.args``.
        place: what named the function's file, for messages.

    Raises:
        ConfigError: it cannot be called like that.
    """
    signature = inspect.signature(function)
    offered = {name: None for name in OFFERED if name in signature.parameters}
    try:
        signature.bind("prompt", "label", "client", **(offered | dict(args)))
    except TypeError as error:
        raise ConfigError(
            f"{place}: {RUN_AGENT}{signature} must take (prompt, label, client) and every key of agent.args: {error}"
        ) from error
    with make_client(Session("", "http://127.0.0.1", "none"), 1.0) as client:
        _ = client.chat.completions, client.responses, client.models  # seconds of imports wait for the first use
    return lambda seed: FunctionInstance(function, args)


def is_async(function: Callable[..., Any]) -> bool:
    """True if calling it gives a coroutine."""
    return inspect.iscoroutinefunction(inspect.unwrap(function))


def keywords_for(function: Callable[..., Any], task: AgentTask, args: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call: all of ``args``, and what the function names of the task."""
    known = inspect.signature(function).parameters
    return {name: getattr(task, name) for name in OFFERED if name in known} | dict(args)


def make_client(session: Session, seconds: float) -> OpenAI:
    """The client of an episode. ``seconds``: how long one call may take."""
    from openai import DefaultHttpxClient, OpenAI

    return OpenAI(**_options(session, seconds), http_client=DefaultHttpxClient(verify=_no_certificates()))


def make_async_client(session: Session, seconds: float) -> AsyncOpenAI:
    """The same for functions that are ``async``."""
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    return AsyncOpenAI(**_options(session, seconds), http_client=DefaultAsyncHttpxClient(verify=_no_certificates()))


def _options(session: Session, seconds: float) -> dict[str, Any]:
    from openai import Timeout

    return {
        "base_url": session.base_url,
        "api_key": session.api_key,
        "max_retries": MAX_RETRIES,
        "timeout": Timeout(seconds, connect=CONNECT_SECONDS),
    }


def _no_certificates() -> ssl.SSLContext:
    """Trusts nobody. The server speaks plain HTTP, and to load the system's certificates takes .1 s an episode."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
