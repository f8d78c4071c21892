"""A controller's time in office: the run's lease in storage and the lease on its actors, renewed together."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from rlhf_core.cluster.wait import one
from rlhf_core.errors import ClusterLostError, DeadlineError, LeaseError, StorageError, WorkerError
from rlhf_core.storage.lease_renewal import require
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from rlhf_core.cluster.groups import ActorGroups
    from rlhf_core.storage import Lease

logger = get_logger(__name__)


class Tenure:
    """Use from one event loop: ``begin``, ``check`` before every act, ``end``."""

    def __init__(self, groups: ActorGroups, lease: Lease, seconds: float) -> None:
        self._groups = groups
        self._lease = lease
        self._seconds = seconds
        self._keeper: Any = None
        self._renewal: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()

    def begin(self) -> None:
        """Renew both leases from now on."""
        self._keeper = self._groups.keeper(self._seconds)
        self._renewal = asyncio.create_task(self._renew_forever())

    async def pause(self) -> None:
        """Stop renewing. A renewal under way ends first: cancelled, it would go on in its thread and race with a release."""
        if self._renewal is not None:
            self._ending.set()
            await asyncio.gather(self._renewal, return_exceptions=True)
            self._renewal = None
            self._ending.clear()

    async def end(self) -> None:
        """Let the next owner in."""
        await self.pause()
        await asyncio.to_thread(self._lease.release)

    def check(self) -> None:
        """Return if this process is still the run's one writer. Called before anything is killed, started or committed.

        Raises:
            LeaseError: another process may work on the run by now.
            ClusterLostError: nobody holds its actors: their cluster is gone.
        """
        run_id = self._lease.run_store.run_id
        if self._renewal is not None and self._renewal.done() and not self._renewal.cancelled():
            error = self._renewal.exception()
            if isinstance(error, ClusterLostError):
                raise error
            raise LeaseError(f"the lease of run {run_id} is lost: {error}") from error
        require(self._lease)

    async def _renew_forever(self) -> None:
        """Renew both leases a few times per term; a store that is away for less than a term is survived."""
        while not self._ending.is_set():
            done = await asyncio.gather(
                asyncio.to_thread(self._lease.renew),
                one(
                    self._keeper.renew.remote(self._groups.names), self._seconds, "keeper"
                ),  # a slow store kills no workers
                return_exceptions=True,
            )
            for error in done:
                if isinstance(error, WorkerError):
                    self._keeper = self._groups.keeper(self._seconds)
                if isinstance(error, StorageError | WorkerError | DeadlineError):
                    logger.warning("lease of run %s not renewed: %s", self._lease.run_store.run_id, error)
                elif isinstance(error, BaseException):
                    raise error
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), self._seconds / 4)
