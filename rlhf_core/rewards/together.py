"""Several scorings at once, of which one failure ends all."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

Result = TypeVar("Result")


async def together(coroutines: Iterable[Coroutine[object, object, Result]]) -> list[Result]:
    """The results, in order. The first error is raised once the others are cancelled and have ended.

    ``asyncio.gather`` would leave them running: a server is then still asked for a stage that has failed.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
