"""What a user's environment is, and where the executors get one from.

::

    AgentInstance(AgentInstanceBase)      the user's class: reset(states), step(states), optionally close()
        └─ Instance (instance.py)         plain JSON and PNG bytes in and out, in the environment's process
    ════════ EnvironmentPool (pool.py): one process an episode ═══════════════════
        Environment.call("step", {...})   what executors see
"""

from __future__ import annotations

import inspect
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager


class AgentInstanceBase:
    """One environment, for one episode. Methods may be plain or ``async``; so may ``__init__``.

    It lives in a process of its own. ``random`` and numpy are seeded there, the same for all samples of one prompt, so that
    these are compared with each other on the same task.
    """

    def __init__(self, **args: Any) -> None:
        """Gets ``agent.args`` as keyword arguments."""

    def reset(self, states: dict[str, Any]) -> Any:
        """Begin.

        Args:
            states: ``observation`` and ``prompt`` (the rendered prompt), ``label``, ``messages`` (the prompt's chat messages,
                or None), ``datasource``, ``seed``, ``sample`` (which of the prompt's samples this is).

        Returns:
            A dict: ``observation`` (text, taken verbatim, or chat messages; default: the prompt as it is),
            ``environment_images``. None: the prompt as it is.
        """
        return {"observation": states["observation"]}

    def step(self, states: dict[str, Any]) -> Any:
        """Hear what the policy said, and answer.

        Args:
            states: ``observation_text`` (all before this turn), ``action_text`` (without the token that closes it), ``label``,
                ``sampling_params``, ``turn`` (0, 1, ...), ``tokens_left`` (of all turns together), ``context_left``.

        Returns:
            A dict: ``done``; ``rewards`` (of this step; may be left out), ``scores``; ``environment_feedback`` (text, taken
            verbatim; or one chat message, or a list of them), ``environment_images``; ``sampling_params`` (of the next turn);
            ``extra_logs`` (numbers by name).
        """
        raise NotImplementedError(f"{type(self).__name__} has no step(states)")

    def close(self) -> Any:
        """Called once at the end, whatever happened, unless the process had to be killed."""


class Environment(Protocol):
    """One environment, as an executor sees it."""

    async def call(self, method: str, payload: dict[str, Any]) -> Any:
        """Call a method of the instance.

        Args:
            method: its name.
            payload: JSON; bytes are allowed as values.

        Raises:
            AgentError: it failed, died, or took longer than ``agent.step_timeout``.
        """
        ...


class EnvironmentSource(Protocol):
    """Where environments come from: ``EnvironmentPool``, or a class in this process."""

    def open(self, seed: int) -> AbstractAsyncContextManager[Environment]:
        """One environment, for one episode; closed when the block ends, whatever happened."""
        ...


class InProcess:
    """Environments in this very process: for one that is isolated already, and for tests. No time limits."""

    def __init__(self, factory: Callable[[int], Any]) -> None:
        self._factory = factory

    @asynccontextmanager
    async def open(self, seed: int) -> AsyncIterator[Environment]:
        """See ``EnvironmentSource``."""
        instance = self._factory(seed)
        try:
            yield _Here(instance)
        finally:
            await awaited(instance.close({}))


async def awaited(value: Any) -> Any:
    """The result of a plain or an ``async`` method."""
    return await value if inspect.isawaitable(value) else value


class _Here:
    def __init__(self, instance: Any) -> None:
        self._instance = instance

    async def call(self, method: str, payload: dict[str, Any]) -> Any:
        return await awaited(getattr(self._instance, method)(payload))
