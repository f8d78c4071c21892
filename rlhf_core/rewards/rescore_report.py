"""What another reward makes of a run's answers: numbers, a picture, and the samples that moved most."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.errors import RewardError
from rlhf_core.records import RewardStatus
from rlhf_core.rewards.comparison import Compared
from rlhf_core.rewards.scatter import draw_scatter
from rlhf_core.storage import trajectories

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.storage import RewardRow, RunStore
    from rlhf_core.storage.rescored import Rescoring

MAX_REASONS = 10  # that are shown
MAX_KEPT_REASONS = 1000  # while counting: a reason may hold the sample's own text
MAX_REASON = 200  # characters
OTHER_REASONS = "other reasons"
TEXTS = ("prompt", "answer", "label", "stop_reason")


@dataclass(frozen=True, slots=True)
class Report:
    """A comparison, for people and programs."""

    body: dict[str, Any]  # JSON
    plot: bytes  # PNG


def make_report(rescoring: Rescoring, iterations: Sequence[int], moved: int) -> Report:
    """Compare the rewards of rescored iterations with those that the run has.

    Args:
        rescoring: with all of ``iterations``.
        iterations: ascending, at least one.
        moved: how many of the samples that moved most are shown.

    Raises:
        RewardError: no sample has both rewards.
        CorruptShardError: a shard is missing or damaged.
    """
    gathered = _Gathered()
    for iteration in iterations:
        gathered.add(iteration, _old_rewards(rescoring.store, iteration), rescoring.rewards(iteration))
    compared = Compared(*(np.array(column, kind) for column, kind in gathered.columns))
    if not gathered.keys:
        raise RewardError(
            f"{rescoring.url}: of {gathered.samples} samples none has both an old and a new reward: nothing to compare "
            f"({gathered.without_old} had none in the run, {gathered.failed} rollouts failed, now: {dict(gathered.reasons)})"
        )
    body = {
        "run_id": rescoring.store.run_id,
        "name": rescoring.name,
        "iterations": list(iterations),
        "samples": gathered.samples,
        "failed_rollouts": gathered.failed,
        "unscored_in_run": gathered.without_old,
        "failures": gathered.shown_reasons(),
        **compared.summary(),
        "moved": _moved(rescoring.store, compared, gathered.keys, moved),
    }
    title = f"{rescoring.store.run_id}, {_span(iterations)}: {len(gathered.keys)} samples"
    return Report(body, draw_scatter(compared.old, compared.new, "reward of the run", rescoring.name, title))


@dataclass(slots=True)
class _Gathered:
    """Rewards of all iterations, and why some are missing."""

    keys: list[tuple[int, str, int]] = field(default_factory=list)  # (iteration, group, sample) of what has both
    groups: list[int] = field(default_factory=list)
    old: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)
    samples: int = 0
    failed: int = 0  # rollouts
    without_old: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    _numbers: dict[tuple[int, str], int] = field(default_factory=dict)

    @property
    def columns(self) -> tuple[tuple[list[Any], Any], ...]:
        return (self.groups, np.int64), (self.old, np.float64), (self.new, np.float64)

    def add(self, iteration: int, old: dict[tuple[str, int], float | None], rows: Sequence[RewardRow]) -> None:
        for row in rows:
            self.samples += 1
            if row.result.status is RewardStatus.SKIPPED:
                self.failed += 1
                continue
            before, after = old.get((row.group_id, row.sample_index)), row.result.reward
            if after is None:
                self._count(f"{row.result.status}: {row.result.error}")
            if before is None:
                self.without_old += 1
            if before is None or after is None:
                continue
            self.keys.append((iteration, row.group_id, row.sample_index))
            self.groups.append(self._numbers.setdefault((iteration, row.group_id), len(self._numbers)))
            self.old.append(before)
            self.new.append(after)

    def shown_reasons(self) -> dict[str, int]:
        named = Counter({reason: count for reason, count in self.reasons.items() if reason != OTHER_REASONS})
        shown = dict(named.most_common(MAX_REASONS))
        others = self.reasons.total() - sum(shown.values())
        return {**shown, **({OTHER_REASONS: others} if others else {})}

    def _count(self, reason: str) -> None:
        reason = reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]} …"
        known = reason in self.reasons or len(self.reasons) < MAX_KEPT_REASONS
        self.reasons[reason if known else OTHER_REASONS] += 1


def _old_rewards(store: RunStore, iteration: int) -> dict[tuple[str, int], float | None]:
    """What the run has of each sample: its reward stage's, else its executor's."""
    table = trajectories(store, iteration, columns=["group_id", "sample_index", "reward"])
    groups, samples, rewards = (table[name].to_pylist() for name in table.column_names)
    return {(group, sample): reward for group, sample, reward in zip(groups, samples, rewards, strict=True)}


def _moved(
    store: RunStore, compared: Compared, keys: Sequence[tuple[int, str, int]], count: int
) -> list[dict[str, Any]]:
    """The samples that moved most, with their texts."""
    chosen = compared.moved_most(count)
    texts = _texts(store, [keys[index] for index in chosen])
    moves = compared.moves()
    return [
        {
            "old": float(compared.old[index]),
            "new": float(compared.new[index]),
            "moved": float(moves[index]),
            **texts[keys[index]],
            "iteration": keys[index][0],
            "group": keys[index][1],
            "sample": keys[index][2],
        }
        for index in chosen
    ]


def _texts(store: RunStore, keys: Sequence[tuple[int, str, int]]) -> dict[tuple[int, str, int], dict[str, Any]]:
    """Readable columns of samples; of several segments the last one's."""
    found: dict[tuple[int, str, int], dict[str, Any]] = {}
    for iteration in sorted({key[0] for key in keys}):
        of_iteration = [key for key in keys if key[0] == iteration]
        where = " or ".join(
            f"(group_id = {_quoted(group)} and sample_index = {sample})" for _, group, sample in of_iteration
        )
        columns = ["group_id", "sample_index", "segment_index", *TEXTS]
        rows = trajectories(store, iteration, where, columns=columns).to_pylist()
        for row in sorted(rows, key=lambda row: int(row["segment_index"])):
            found[iteration, row["group_id"], row["sample_index"]] = {name: row[name] for name in TEXTS}
    return found


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _span(iterations: Sequence[int]) -> str:
    first, last = iterations[0], iterations[-1]
    return f"iteration {first}" if first == last else f"iterations {first}..{last}"
