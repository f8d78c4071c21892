"""Waiting for remote calls: always with a limit, and with an error that names what was waited for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ray.exceptions import (
    ActorUnavailableError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    WorkerCrashedError,
)

from rlhf_core.errors import DeadlineError, WorkerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

# What Ray raises when a process is gone, as opposed to what the code in it raised.
PROCESS_GONE = (RayActorError, ActorUnavailableError, WorkerCrashedError, ObjectLostError, OutOfMemoryError)


async def all_of(calls: Sequence[Awaitable[Any]], seconds: float, what: str) -> list[Any]:
    """The results of remote calls that run at the same time.

    Raises:
        DeadlineError: not all answered within ``seconds``.
        WorkerError: a process died.
    """
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return list(await asyncio.gather(*calls))
    except TimeoutError as error:
        if not limit.expired():  # raised by a call, in its own words
            raise
        raise DeadlineError(f"{what}: no answer within {seconds:g} s") from error
    except PROCESS_GONE as error:
        raise WorkerError(f"{what}: {_first_line(error)}") from error


async def one(call: Awaitable[Any], seconds: float, what: str) -> Any:
    """The result of one remote call; errors as ``all_of``."""
    return (await all_of([call], seconds, what))[0]


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) if lines else type(error).__name__
