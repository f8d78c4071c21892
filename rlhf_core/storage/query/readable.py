"""The columns of a trajectory as people and queries see them: what each is made from, and how.

::

    rollout shard   prompt, answer, token_ids, …  ─┐
    reward shard    status, reward, score, …      ─┼─ (group, sample) ─▶ readable columns
    the log         run_id, iteration, batch      ─┘
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlhf_core.storage.shards import schema

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

KEY = ("group_id", "sample_index")  # what a row of a rollout shard and its row of a reward shard share
REWARD_PREFIX = "reward."  # before the name of a column of the reward shard


class Column:
    """A readable column: its type, the stored columns it is made from, and how."""

    def __init__(
        self, kind: pa.DataType, sources: tuple[str, ...], make: Callable[[Mapping[str, pa.Array]], Any]
    ) -> None:
        """``make`` is given the ``sources``, and the columns of the reward shard where the reward stage is complete."""
        self.kind = kind
        self.sources = sources
        self.make = make


def _same(name: str) -> Column:
    return Column(schema.TRAJECTORY.field(name).type, (name,), lambda stored: stored[name])


def _of_the_log(name: str, kind: pa.DataType) -> Column:
    return Column(kind, (), lambda stored: stored[name])


def _rewarded(name: str, reward_name: str) -> Column:
    """The reward stage's value where it scored the row, else the executor's."""

    def make(stored: Mapping[str, pa.Array]) -> Any:
        if f"{REWARD_PREFIX}status" not in stored:
            return stored[name]
        scored = stored[f"{REWARD_PREFIX}status"].is_valid()
        return pc.if_else(scored, stored[f"{REWARD_PREFIX}{reward_name}"], stored[name])

    return Column(schema.TRAJECTORY.field(name).type, (name,), make)


def _reward_only(name: str) -> Column:
    kind = schema.REWARD.field(name).type

    def make(stored: Mapping[str, pa.Array]) -> Any:
        found = stored.get(f"{REWARD_PREFIX}{name}")
        return pa.nulls(len(stored["run_id"]), kind) if found is None else found

    return Column(kind, (), make)


def _tokens(stored: Mapping[str, pa.Array]) -> Any:
    return stored["token_ids"].value_lengths()


def _action_tokens(stored: Mapping[str, pa.Array]) -> Any:
    return _sum_per_row(stored["action_ranges"], _range_lengths(stored["action_ranges"])).astype(np.int32)


def _mean_logprob(stored: Mapping[str, pa.Array]) -> Any:
    """Mean log-prob of the action tokens; null where the policy said nothing."""
    logprobs = stored["rollout_logprobs"]
    sums = _sum_per_row(logprobs, logprobs.values.to_numpy(zero_copy_only=False).astype(np.float64))
    counts = _action_tokens(stored)
    means = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
    return pa.array(means, mask=counts == 0)


def _version(pick: np.ufunc) -> Callable[[Mapping[str, pa.Array]], Any]:
    """The least or the greatest version of each row; null where the policy said nothing."""

    def make(stored: Mapping[str, pa.Array]) -> Any:
        spans = stored["version_spans"]
        versions = spans.values.field("version").to_numpy(zero_copy_only=False)
        starts, ends = (spans.offsets.to_numpy()[rows] for rows in (slice(None, -1), slice(1, None)))
        spoke = ends > starts
        picked = np.zeros(len(spans), np.int64)
        if spoke.any():
            picked[spoke] = pick.reduceat(versions, starts[spoke])
        return pa.array(picked, mask=~spoke)

    return make


def _range_lengths(ranges: pa.ListArray) -> Any:
    starts, ends = (ranges.values.field(i).to_numpy(zero_copy_only=False) for i in (0, 1))
    return (ends - starts).astype(np.int64)


def _sum_per_row(column: pa.ListArray, values: Any) -> Any:
    """Sum of ``values``, which lie flat as the items of ``column`` do, over each of its rows."""
    running = np.concatenate(([0], np.cumsum(values)))
    offsets = column.offsets.to_numpy(zero_copy_only=False)
    return running[offsets[1:]] - running[offsets[:-1]]


READABLE: dict[str, Column] = {
    "run_id": _of_the_log("run_id", pa.string()),
    "iteration": _of_the_log("iteration", pa.int64()),
    "batch": _of_the_log("batch", pa.int64()),
    **{name: _same(name) for name in ("round", "prompt_id", "group_id", "sample_index", "segment_index")},
    **{name: _same(name) for name in ("datasource", "prompt", "answer", "transcript", "label")},
    "reward": _rewarded("reward", "reward"),
    "score": _rewarded("score", "score"),
    "reward_status": _rewarded("reward_status", "status"),
    "reward_error": _reward_only("error"),
    "reward_metrics": _reward_only("metrics"),
    **{name: _same(name) for name in ("stop_reason", "error")},
    "tokens": Column(pa.int32(), ("token_ids",), _tokens),
    "action_tokens": Column(pa.int32(), ("action_ranges",), _action_tokens),
    "mean_logprob": Column(pa.float64(), ("rollout_logprobs", "action_ranges"), _mean_logprob),
    "version_min": Column(pa.int64(), ("version_spans",), _version(np.minimum)),
    "version_max": Column(pa.int64(), ("version_spans",), _version(np.maximum)),
    **{name: _same(name) for name in ("seed", "sampling", "metrics", "started_at", "seconds")},
}
BULKY: dict[str, Column] = {
    name: _same(name)
    for name in (
        "messages",
        "token_ids",
        "action_ranges",
        "rollout_logprobs",
        "version_spans",
        "step_rewards",
        "images",
        "image_ranges",
    )
}
COLUMNS = READABLE | BULKY
REWARDED = frozenset({"reward", "score", "reward_status", "reward_error", "reward_metrics"})
SCHEMA = pa.schema([pa.field(name, column.kind) for name, column in COLUMNS.items()])
