"""Which rows of its prompt datasets a run has sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.records import Stage
from rlhf_core.storage.shards import schema

if TYPE_CHECKING:
    from rlhf_core.records import Part
    from rlhf_core.storage.run_store import RunStore


def drawn_rows(run_store: RunStore) -> set[str]:
    """The row ids of every prompt in a complete rollout or a recorded round: trained, filtered out or failed.

    Raises:
        CorruptShardError: a shard is missing or damaged. It names the object.
    """
    found: set[str] = set()
    for iteration in run_store.iterations():
        for part in _parts(run_store, iteration).values():
            table = run_store.read_table(part, schema.TRAJECTORY, ["prompt_id"])
            found.update(table["prompt_id"].to_pylist())
    return found


def _parts(run_store: RunStore, iteration: int) -> dict[str, Part]:
    """By path: rounds and the manifest may name one twice."""
    rollout = run_store.stage(iteration, Stage.ROLLOUT)
    named = [*(rollout[0].parts if rollout else ()), *(p for r in run_store.rounds(iteration) for p in r.parts)]
    return {part.path: part for part in named}
