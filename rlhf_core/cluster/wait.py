"""Waiting for remote calls: always with a limit, and with an error that names what was waited for."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ray.exceptions import (
    ActorUnavailableError,
    AuthenticationError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RaySystemError,
    RayTaskError,
    RpcError,
    WorkerCrashedError,
)

from rlhf_core.errors import ClusterLostError, DeadlineError, RlhfError, WorkerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator, Sequence

# What Ray raises when a process is gone, as opposed to what the code in it raised.
PROCESS_GONE = (RayActorError, ActorUnavailableError, WorkerCrashedError, ObjectLostError, OutOfMemoryError)

# What Ray raises when the head is not the one this process joined: its successor at the same address does not know us.
CLUSTER_GONE = (AuthenticationError, RpcError, RaySystemError)


async def all_of(calls: Sequence[Awaitable[Any]], seconds: float, what: str) -> list[Any]:
    """The results of remote calls that run at the same time.

    Raises:
        DeadlineError: not all answered within ``seconds``.
        WorkerError: a process died.
        RlhfError: whatever a call raised: as it is, not in Ray's words around it.
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
    except RayTaskError as error:
        if isinstance(error.cause, RlhfError):
            raise error.cause from error
        raise


async def one(call: Awaitable[Any], seconds: float, what: str) -> Any:
    """The result of one remote call; errors as ``all_of``."""
    return (await all_of([call], seconds, what))[0]


@contextmanager
def on_this_cluster() -> Iterator[None]:
    """Around questions to the cluster itself.

    Raises:
        ClusterLostError: it is gone. This process cannot join the next one with what it holds of the old one.
    """
    try:
        yield
    except CLUSTER_GONE as error:
        raise ClusterLostError(
            f"the Ray cluster of this run is gone ({str(error).partition('. Ensure that')[0]}): bring it back (`rlhf up`), and "
            "retry the run; its log says where to go on"
        ) from error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) if lines else type(error).__name__
