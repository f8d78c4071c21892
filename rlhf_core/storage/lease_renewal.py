"""A lease that is held while a block of asynchronous work lasts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from rlhf_core.errors import LeaseError, StorageError
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rlhf_core.storage.lease import Lease

logger = get_logger(__name__)


@contextlib.asynccontextmanager
async def renewed(lease: Lease) -> AsyncIterator[Lease]:
    """Renew the lease a few times per term until the block ends, then let the next owner in.

    A store that is away for less than a term is survived. Call ``require`` before anything is written.
    """
    ending = asyncio.Event()
    renewal = asyncio.create_task(_renew(lease, ending))
    try:
        yield lease
    finally:
        ending.set()
        await asyncio.gather(renewal, return_exceptions=True)
        await asyncio.to_thread(lease.release)


def require(lease: Lease) -> None:
    """Return if the lease is still held.

    Raises:
        LeaseError: it has expired, so that another process may write by now.
    """
    if time.time() > lease.expires_at:
        raise LeaseError(
            f"the lease of run {lease.run_store.run_id} has expired: the store did not take a renewal for {lease.seconds:g} s "
            "(run.lease_seconds); start the run again"
        )


async def _renew(lease: Lease, ending: asyncio.Event) -> None:
    while not ending.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ending.wait(), lease.seconds / 4)
            return
        try:
            await asyncio.to_thread(lease.renew)
        except StorageError as error:
            logger.warning("lease of %s not renewed: %s", lease.run_store.run_id, error)
        except LeaseError as error:  # it expires on this side too, and nothing is written any more
            logger.warning("%s", error)
            return
