"""What earlier attempts at a draw left behind: its finished groups are durable, and are not sampled again.

::

    parts of the iteration ──(minus those of recorded rounds)──▶ whole, of this draw, spoken by versions that may ──▶ taken over
                                                                        └─ else: superseded, and its groups sampled again
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_core.records import Stage, episodes_of
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from rlhf_core.records import Draw, Part, Trajectory
    from rlhf_core.storage import RunStore

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Published:
    """Groups that are not sampled again."""

    parts: tuple[Part, ...]
    rows: tuple[Trajectory, ...]
    places: dict[str, str]  # group -> path of its part


def published_groups(store: RunStore, draw: Draw, group_ids: Collection[str]) -> Published:
    """Of these groups of a draw, those that lie whole in the log.

    Superseded are shards of policy versions that may not speak any more, and of groups with a failed sample: what failed then
    (a broken environment, an engine that died) deserves another try, and ``rollout.on_error`` its say.
    """
    parts: list[Part] = []
    taken: list[Trajectory] = []
    places: dict[str, str] = {}
    for part in store.published_parts(draw.iteration, Stage.ROLLOUT, without=draw.recorded):
        rows = store.read_trajectories([part])
        held = {row.group_id for row in rows}
        if reason := _superseded(rows, held, draw, group_ids, places):
            logger.warning("%s %s", part.path, reason)
            continue
        parts.append(part)
        taken += rows
        places |= dict.fromkeys(held, part.path)
    return Published(tuple(parts), tuple(taken), places)


def _superseded(
    rows: Sequence[Trajectory], held: set[str], draw: Draw, group_ids: Collection[str], places: dict[str, str]
) -> str:
    """Why a shard does not count; empty: it does."""
    oldest, newest = draw.oldest_version, draw.iteration
    if not held <= set(group_ids):
        return "holds groups that are not of this draw: superseded, not trained"
    if any(not oldest <= span.version <= newest for row in rows for span in row.version_spans):
        return f"is not of policy versions {oldest} to {newest}: superseded, not trained"
    if any(episode.failed for episode in episodes_of(rows)):
        return "holds failed samples: superseded, sampled again"
    if twice := held & places.keys():
        return f"repeats group {min(twice)}: superseded, not trained"
    return ""
