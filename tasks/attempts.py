"""Attempts at a run: recorded in its log; those of one flow run one after the other.

A flow run is sometimes started again while its process still lives, or before it can be told that it does not: the process
was out of the server's sight for a while, or died in another container, whose lease is good for some seconds more. It is no
error then, as it is for anybody else, that the run is held: the new attempt waits for its turn.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from rlhf_core.errors import RlhfError
from rlhf_core.storage import begin_attempt, end_attempt, holder
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rlhf_core.cluster.actor_session import ActorSession
    from rlhf_core.storage import RunStore

logger = get_logger(__name__)

LOOK_SECONDS = 1.0


async def earlier_attempt_over(store: RunStore, flow_run_id: str | None) -> None:
    """Return once no other process holds the run for this flow run; at once if another flow run does.

    It ends: the other process finishes, or its lease expires because it does not renew it.
    """
    told = False
    while flow_run_id is not None:
        held = await asyncio.to_thread(holder, store)
        if held is None or held.is_free or held.owner.job != flow_run_id:
            return
        if not told:
            logger.warning("%s holds the run as an earlier attempt of this flow run: waiting until it ends", held.owner)
            told = True
        await asyncio.sleep(LOOK_SECONDS)


@asynccontextmanager
async def recorded_attempt(store: RunStore, session: ActorSession) -> AsyncIterator[None]:
    """Around all that a process does with a run: the log says that it began, and how it ended."""
    owner = session.owner
    number = await asyncio.to_thread(begin_attempt, store, owner.host, owner.pid, owner.job or None)
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        try:
            await asyncio.to_thread(end_attempt, store, number, error, session.restarts)
        except (RlhfError, OSError) as failure:  # what ended the run is what matters
            logger.warning("how attempt %d ended is not recorded: %s", number, failure)
