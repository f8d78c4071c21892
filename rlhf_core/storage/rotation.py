"""Which checkpoints stay, and how the others go.

::

    new checkpoint complete ─▶ kept: the newest, the best, and the newest ``max_num`` that fit into ``max_bytes``
                            └▶ gone: every other that is older than the newest complete one, whole or not

What is newer than the newest complete checkpoint may be a save under way and is never touched. What a crashed save or a broken
deletion left is older than that by the next rotation, and goes then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.storage.checkpoints import CheckpointStore, Held

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Keep:
    """How much may stay; None: any amount."""

    max_num: int | None = None  # checkpoints; the best one is kept besides
    max_bytes: float | None = None  # of all that stay, the best one included


def rotate(checkpoints: CheckpointStore, keep: Keep, best: int | None = None) -> list[int]:
    """Delete what ``keep`` leaves no room for. Call once a new checkpoint is complete.

    Args:
        checkpoints: of the run; no other process may be saving an older version.
        keep: the limits; without any, nothing is deleted.
        best: the best version, which stays, as the newest complete one does.

    Returns:
        The deleted versions, oldest first.
    """
    if keep.max_num is None and keep.max_bytes is None:
        return []
    held = checkpoints.held()
    gone = surplus(held, keep, best)
    for each in held:
        if each.version in gone:
            what = "checkpoint" if each.complete else "what is left of checkpoint"
            logger.info("deleting %s %d, %d bytes", what, each.version, each.bytes)
            checkpoints.delete(each.version)
    left = sum(each.bytes for each in held if each.version not in gone)
    if keep.max_bytes is not None and left > keep.max_bytes:
        logger.warning(
            "the newest and the best checkpoint of %s, which always stay, hold %.3g GiB, more than ckpt.max_mem=%.3g: raise it",
            checkpoints.run_store.url,
            left / 2**30,
            keep.max_bytes / 2**30,
        )
    return gone


def surplus(held: Sequence[Held], keep: Keep, best: int | None = None) -> list[int]:
    """The versions to delete of ``held`` (ascending), oldest first."""
    complete = [each for each in held if each.complete]
    if not complete:
        return []
    newest = complete[-1].version
    kept = {newest, best}
    taken = sum(each.bytes for each in held if each.version in kept)
    for each in reversed(complete[-(keep.max_num or len(complete)) :]):
        if each.version in kept:
            continue
        taken += each.bytes
        if keep.max_bytes is not None and taken > keep.max_bytes:
            break
        kept.add(each.version)
    return [each.version for each in held if each.version < newest and each.version not in kept]
