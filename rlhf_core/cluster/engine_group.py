"""The engines of a run, as a training rank sees them when it hands over weights."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError

from rlhf_core.cluster.address import node_id
from rlhf_core.cluster.wait import PROCESS_GONE
from rlhf_core.cluster.weight_relay import read_pieces
from rlhf_core.errors import DeadlineError, WorkerError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
        """Every engine takes the new version at the same time. Packed weights are brought to the engines' nodes first."""
        what = f"weight sync to version {update.version}"
        if update.backend != "shm":
            self._all([engine.update_weights.remote(update) for engine in self._engines], what)
            return
        with self._on_every_node(update, what) as updates:
            self._all(
                [engine.update_weights.remote(each) for engine, each in zip(self._engines, updates, strict=True)], what
            )

    @contextmanager
    def _on_every_node(self, update: WeightUpdate, what: str) -> Iterator[list[WeightUpdate]]:
        """Within, a file with the weights lies on each engine's node: one update for each engine, which names it."""
        nodes = self._all([engine.node.remote() for engine in self._engines], what)
        here = node_id()
        first = {
            node: engine for engine, node in reversed(list(zip(self._engines, nodes, strict=True))) if node != here
        }
        by_node = {here: update}
        try:
            if first:
                path = Path(update.payload["path"])
                size, pieces = path.stat().st_size, read_pieces(path)
                received = self._all(
                    [engine.receive_weights.remote(update, size, pieces) for engine in first.values()], what
                )
                by_node |= zip(first, received, strict=True)
            yield [by_node[node] for node in nodes]
        finally:
            for node, engine in first.items():
                if node in by_node:
                    engine.delete_weights.remote(by_node[node])

    def _all(self, calls: list[Any], what: str) -> list[Any]:
        try:
            return list(ray.get(calls, timeout=self._timeout))
        except GetTimeoutError as error:
            raise DeadlineError(f"{what}: no answer within {self._timeout:g} s") from error
        except PROCESS_GONE as error:
            raise WorkerError(f"{what}: an engine died: {error}") from error
