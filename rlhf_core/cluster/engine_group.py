"""The engines of a run, as a training rank sees them when it hands over weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError

from rlhf_core.cluster.wait import PROCESS_GONE
from rlhf_core.errors import DeadlineError, WorkerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.weights import WeightUpdate


class RayEngineGroup:
    """``weights.EngineGroup`` over engine actors; blocking, for use inside a training rank."""

    def __init__(self, engines: Sequence[Any], timeout: float) -> None:
        self._engines = list(engines)
        self._timeout = timeout

    @property
    def num_engines(self) -> int:
        """How many there are."""
        return len(self._engines)

    @property
    def identity(self) -> list[Any]:
        """Which actors these are: an engine that was made again is another one."""
        return [engine._actor_id for engine in self._engines]

    def init_weight_transfer(self, init_infos: Sequence[dict[str, Any]]) -> None:
        """Hand engine ``i`` the ``i``-th rendezvous."""
        self._all(
            [e.init_weight_transfer.remote(info) for e, info in zip(self._engines, init_infos, strict=True)],
            "weight sync: meeting the engines",
        )

    def update_weights(self, update: WeightUpdate) -> None:
        """Every engine takes the new version at the same time."""
        self._all(
            [engine.update_weights.remote(update) for engine in self._engines],
            f"weight sync to version {update.version}",
        )

    def _all(self, calls: list[Any], what: str) -> None:
        try:
            ray.get(calls, timeout=self._timeout)
        except GetTimeoutError as error:
            raise DeadlineError(f"{what}: no answer within {self._timeout:g} s") from error
        except PROCESS_GONE as error:
            raise WorkerError(f"{what}: an engine died: {error}") from error
