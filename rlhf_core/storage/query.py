"""The trajectories of a run as a table for people: prompt, answer, reward, log-probs in summary.

::

    rollout parts ─ only the columns asked for ─▶ readable columns ─┐
                                                                    ├─ (group, sample) ─▶ where ─▶ limit ─▶ pa.Table
    reward parts ───────────────────────────────────────────────────┘

Only groups that a manifest names are looked at, one iteration at a time, so a long run needs no more memory than its largest
iteration; once ``limit`` rows are found, nothing more is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlhf_core.errors import ConfigError, CorruptShardError
from rlhf_core.records import Stage
from rlhf_core.storage import predicate, schema, shards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rlhf_core.records import Part
    from rlhf_core.storage.run_store import RunStore

_KEY = ("group_id", "sample_index")


def trajectories(
    run_store: RunStore,
    iteration: int | None = None,
    where: str | None = None,
    limit: int | None = None,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """Trajectories of complete rollouts, with their rewards where the reward stage is complete too.

    Args:
        run_store: The run.
        iteration: Only this one; default: all, in order.
        where: A predicate (see ``predicate``), such as ``"reward < 0 and stop_reason = 'length'"``.
        limit: At most so many rows, the first ones.
        columns: Which of ``COLUMNS``, in this order; default: all.

    Raises:
        ConfigError: a bad predicate or an unknown column. The message names the columns there are.
        CorruptShardError: a shard is missing or damaged.
    """
    wanted = list(COLUMNS) if columns is None else list(columns)
    _check_columns(wanted)
    condition = None if where is None else predicate.parse(where, COLUMNS)
    needed = list(dict.fromkeys([*wanted, *(condition.columns if condition else ())]))
    found: list[pa.Table] = []
    for table in _tables(run_store, iteration, needed):
        kept = table if condition is None else _filtered(table, condition, str(where))
        found.append(kept.select(wanted))
        if limit is not None and sum(len(part) for part in found) >= limit:
            break
    result = pa.concat_tables([_empty(wanted), *found])
    return result if limit is None else result.slice(0, limit)


def _tables(run_store: RunStore, iteration: int | None, columns: list[str]) -> Iterator[pa.Table]:
    for number in run_store.iterations() if iteration is None else [iteration]:
        rollout = run_store.stage(number, Stage.ROLLOUT)
        if rollout is None:
            continue
        rewards = _rewards(run_store, number) if _REWARDED & set(columns) else None
        for part in rollout[0].parts:
            yield _readable(run_store, part, rewards, columns, rollout[0].selected)


def _readable(
    run_store: RunStore, part: Part, rewards: pa.Table | None, columns: list[str], selected: frozenset[str] | None
) -> pa.Table:
    """``selected``: the groups of the batch, where the part also holds others."""
    sources = {source for name in columns for source in COLUMNS[name].sources} | set(_KEY)
    raw = _decoded(run_store, part, schema.TRAJECTORY, [name for name in schema.TRAJECTORY.names if name in sources])
    if selected is not None:
        raw = raw.filter(pc.is_in(raw["group_id"], pa.array(sorted(selected), pa.string())))
    raw = raw.combine_chunks()
    joined = _joined(raw, rewards)
    return pa.table({name: pa.chunked_array([COLUMNS[name].make(joined)], COLUMNS[name].kind) for name in columns})


def _rewards(run_store: RunStore, iteration: int) -> pa.Table | None:
    reward = run_store.stage(iteration, Stage.REWARD)
    if reward is None:
        return None
    return pa.concat_tables(
        [schema.REWARD.empty_table()] + [_decoded(run_store, p, schema.REWARD) for p in reward[0].parts]
    )


def _decoded(run_store: RunStore, part: Part, table: pa.Schema, columns: list[str] | None = None) -> pa.Table:
    try:
        return shards.decode_table(run_store.read_part(part), table, columns)
    except CorruptShardError as error:
        raise CorruptShardError(f"{run_store.url_of(part.path)}: {error}") from error


def _joined(raw: pa.Table, rewards: pa.Table | None) -> dict[str, pa.Array]:
    """The columns of ``raw``, and beside them ``reward.…``: the reward rows in the same order, null where none is."""
    columns = {name: _array(raw[name]) for name in raw.column_names}
    if rewards is not None:
        place = {key: i for i, key in enumerate(zip(*(rewards[name].to_pylist() for name in _KEY), strict=True))}
        order = pa.array(
            [place.get(key) for key in zip(*(raw[name].to_pylist() for name in _KEY), strict=True)], pa.int64()
        )
        columns |= {f"reward.{name}": _array(rewards[name].take(order)) for name in rewards.column_names}
    return columns


def _array(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _filtered(table: pa.Table, condition: predicate.Predicate, where: str) -> pa.Table:
    try:
        return table.filter(condition.expression)
    except pa.ArrowException as error:
        kinds = ", ".join(f"{name} is {COLUMNS[name].kind}" for name in sorted(condition.columns))
        raise ConfigError(f"where {where!r} compares different types ({kinds}): {error}") from error


def _check_columns(wanted: list[str]) -> None:
    unknown = [name for name in wanted if name not in COLUMNS]
    if unknown:
        raise ConfigError(f"there is no column {', '.join(unknown)}; columns are {', '.join(COLUMNS)}")


def _empty(columns: list[str]) -> pa.Table:
    return pa.schema([pa.field(name, COLUMNS[name].kind) for name in columns]).empty_table()


class _Column:
    """A readable column: what it is made from, and how."""

    def __init__(self, kind: pa.DataType, sources: tuple[str, ...], make: Callable[[dict[str, pa.Array]], Any]) -> None:
        self.kind = kind
        self.sources = sources
        self.make = make


def _same(name: str) -> _Column:
    return _Column(schema.TRAJECTORY.field(name).type, (name,), lambda columns: columns[name])


def _rewarded(name: str, reward_name: str) -> _Column:
    """The reward stage's value where it scored the row, else the executor's."""

    def make(columns: dict[str, pa.Array]) -> Any:
        if "reward.status" not in columns:
            return columns[name]
        scored = columns["reward.status"].is_valid()
        return pc.if_else(scored, columns[f"reward.{reward_name}"], columns[name])

    return _Column(schema.TRAJECTORY.field(name).type, (name,), make)


def _reward_only(name: str) -> _Column:
    kind = schema.REWARD.field(name).type

    def make(columns: dict[str, pa.Array]) -> Any:
        return columns.get(f"reward.{name}", pa.nulls(len(columns["group_id"]), kind))

    return _Column(kind, (), make)


def _tokens(columns: dict[str, pa.Array]) -> Any:
    return columns["token_ids"].value_lengths()


def _action_tokens(columns: dict[str, pa.Array]) -> Any:
    return _sum_per_row(columns["action_ranges"], _range_lengths(columns["action_ranges"])).astype(np.int32)


def _mean_logprob(columns: dict[str, pa.Array]) -> Any:
    """Mean log-prob of the action tokens; null where the policy said nothing."""
    logprobs = columns["rollout_logprobs"]
    sums = _sum_per_row(logprobs, logprobs.values.to_numpy(zero_copy_only=False).astype(np.float64))
    counts = _action_tokens(columns)
    means = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
    return pa.array(means, mask=counts == 0)


def _version(pick: Callable[..., Any]) -> Callable[[dict[str, pa.Array]], Any]:
    def make(columns: dict[str, pa.Array]) -> Any:
        rows = columns["version_spans"].to_pylist()
        return pa.array([pick((span["version"] for span in row), default=None) for row in rows], pa.int64())

    return make


def _range_lengths(ranges: pa.ListArray) -> Any:
    starts, ends = (ranges.values.field(i).to_numpy(zero_copy_only=False) for i in (0, 1))
    return (ends - starts).astype(np.int64)


def _sum_per_row(column: pa.ListArray, values: Any) -> Any:
    """Sum of ``values``, which lie flat as the items of ``column`` do, over each of its rows."""
    running = np.concatenate(([0], np.cumsum(values)))
    offsets = column.offsets.to_numpy(zero_copy_only=False)
    return running[offsets[1:]] - running[offsets[:-1]]


COLUMNS: dict[str, _Column] = {
    **{name: _same(name) for name in ("run_id", "iteration", "round", "prompt_id", "group_id", "sample_index")},
    **{name: _same(name) for name in ("segment_index", "datasource", "prompt", "answer", "label")},
    "reward": _rewarded("reward", "reward"),
    "score": _rewarded("score", "score"),
    "reward_status": _rewarded("reward_status", "status"),
    "reward_error": _reward_only("error"),
    "reward_metrics": _reward_only("metrics"),
    **{name: _same(name) for name in ("stop_reason", "error")},
    "tokens": _Column(pa.int32(), ("token_ids",), _tokens),
    "action_tokens": _Column(pa.int32(), ("action_ranges",), _action_tokens),
    "mean_logprob": _Column(pa.float64(), ("rollout_logprobs", "action_ranges"), _mean_logprob),
    "version_min": _Column(pa.int64(), ("version_spans",), _version(min)),
    "version_max": _Column(pa.int64(), ("version_spans",), _version(max)),
    **{name: _same(name) for name in ("seed", "sampling", "metrics", "started_at", "seconds")},
}
_REWARDED = {"reward", "score", "reward_status", "reward_error", "reward_metrics"}
