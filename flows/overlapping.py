"""Child runs that overlap, all in this process: where one fails, or the parent is cancelled, all end.

asyncio's task group wraps what ended it in an ``ExceptionGroup``, in which Prefect sees no cancellation: it would call the run
crashed, and the automation for crashes would continue it. So the one exception that matters is raised in its place.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import TracebackType


class Overlapping:
    """``async with Overlapping() as children``: waits for all of them at its end."""

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()

    def start(self, child: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a child beside the others; may be awaited."""
        return self._group.create_task(child)

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._group.__aexit__(kind, error, traceback)
            return
        except BaseExceptionGroup as group:
            ended_by = decisive(group)
        raise ended_by  # out here, where it keeps its own cause


def decisive(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What is to be said of a group that ended: its first signal to end (no ``Exception``), else its first failure."""
    leaves = _leaves(group)
    return next((leaf for leaf in leaves if not isinstance(leaf, Exception)), leaves[0])


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
