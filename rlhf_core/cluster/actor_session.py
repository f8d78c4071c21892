"""What the sessions of all kinds of run share: the actors, the time in office, and healing."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from rlhf_core.cluster.observation import Observer
from rlhf_core.cluster.tenure import Tenure
from rlhf_core.errors import WorkerError
from rlhf_core.redaction import redact
from rlhf_core.storage import Restart
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rlhf_core.cluster.groups import ActorGroups
    from rlhf_core.config.model import RunConfig
    from rlhf_core.storage import Lease, LeaseOwner

logger = get_logger(__name__)

DIGEST = "digest"  # of the weights of what a run trains, in the records of its updates and checkpoints


class ActorSession(ABC):
    """The processes of a run. Use from one event loop; ``close`` in any case."""

    def __init__(self, groups: ActorGroups, lease: Lease, run: RunConfig) -> None:
        self._groups = groups
        self._run = run
        self._tenure = Tenure(groups, lease, run.lease_seconds)
        self._lease = lease
        self.restarts: list[Restart] = []  # of workers that died, by this process

    @property
    def owner(self) -> LeaseOwner:
        """The process that works on the run."""
        return self._lease.owner

    def observer(self) -> Observer:
        """Who looks at the actors while they work."""
        return Observer(self._groups)

    async def close(self, keep_actors: bool) -> None:
        """Give the run back, whatever becomes of the actors.

        With ``keep_actors`` the next attempt finds them, until the keeper's lease ends.
        """
        try:
            if not keep_actors:
                await self.tidy()
                await self.discard_actors()
        finally:
            await self._tenure.end()

    async def discard_actors(self) -> None:
        """End every actor, and give their slots back; ``open`` makes new ones."""
        await self._tenure.pause()
        await asyncio.to_thread(self._groups.discard)

    async def heal(self, version: int, work: Callable[[], Awaitable[Any]]) -> Any:
        """Run ``work`` with every learning actor at ``version``; where a worker dies, rebuild it and run ``work`` again.

        Raises:
            WorkerError: after ``run.max_restarts`` rebuilds.
        """
        return await self._healing(lambda: self.ensure(version), work)

    async def _healing(self, prepare: Callable[[], Awaitable[None]], work: Callable[[], Awaitable[Any]]) -> Any:
        """``prepare`` and ``work``, both again where a worker dies; errors as ``heal``."""
        for restart in range(self._run.max_restarts + 1):
            try:
                self.check_lease()
                await prepare()
                return await work()
            except WorkerError as error:
                if restart == self._run.max_restarts:
                    raise
                self.restarts.append(Restart(round(time.time(), 3), redact(str(error))))
                logger.warning("rebuilding workers (%d of %d): %s", restart + 1, self._run.max_restarts, error)
        raise AssertionError("unreachable")

    def check_lease(self) -> None:
        """See ``Tenure.check``."""
        self._tenure.check()

    @abstractmethod
    async def ensure(self, version: int) -> None:
        """Everything that an update needs alive, and what learns at ``version``."""

    @abstractmethod
    async def tidy(self) -> None:
        """Before the actors are killed: end what would outlive them."""
