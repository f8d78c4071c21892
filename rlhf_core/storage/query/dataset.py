"""The trajectories of many runs as one Arrow dataset that reads no more than a query needs.

::

    run ─▶ iteration ─▶ reward shards ─▶ part ─▶ columns the filter looks at ─▶ rows that match ─▶ the other columns
       └──────── left out here, where what is known of it rules out a match ───────┘

Whoever scans it (DuckDB does) says which columns it wants and which filter holds. Only parts that a manifest names are
looked at, one at a time, so a scan needs no more memory than one part and the rewards of one iteration. Every byte that
is decoded was verified against its sha256 first.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from rlhf_core.errors import CorruptShardError
from rlhf_core.records import Stage
from rlhf_core.storage.query.readable import COLUMNS, KEY, REWARD_PREFIX, REWARDED, SCHEMA
from rlhf_core.storage.shards import schema
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from rlhf_core.records import Part, StageManifest
    from rlhf_core.storage.run_store import RunStore

logger = get_logger(__name__)

_FORMAT = ds.IpcFileFormat()
_NOTHING = pa.py_buffer(b"")
_ROW = "row of the part"  # beside the columns of a filter; no column is called so


class TrajectoryDataset(ds.Dataset):  # type: ignore[misc]  # pyarrow is untyped
    """Trajectories of complete rollouts, with their rewards where the reward stage is complete too."""

    def __init__(self, runs: Sequence[RunStore], iteration: int | None = None, skip_damaged: bool = False) -> None:
        """Describe the dataset; nothing is read.

        Args:
            runs: Their logs, in the order of the rows.
            iteration: Only the batch of this one; default: all, in order.
            skip_damaged: Leave out what is missing or damaged, with a warning that names it; default: an error.
        """
        self._runs = runs
        self._iteration = iteration
        self._skip_damaged = skip_damaged
        self.failure: Exception | None = None  # why the last scan ended early: Arrow hands on no more than its text

    @property
    def schema(self) -> pa.Schema:
        """Every column, in the order of ``readable.COLUMNS``."""
        return SCHEMA

    def scanner(self, columns: list[str] | None = None, filter: pc.Expression | None = None) -> _Scan:
        """A scan of some columns (default: all) of the rows for which ``filter`` is true."""
        return _Scan(self, SCHEMA.names if columns is None else columns, filter)

    def iterations(self) -> Iterator[tuple[RunStore, int]]:
        """What there is to look at, in order."""
        for run in self._runs:
            for number in run.iterations() if self._iteration is None else [self._iteration]:
                yield run, number

    def left_out(self, error: CorruptShardError) -> None:
        """Say that something damaged is left out, or refuse to."""
        if not self._skip_damaged:
            raise error
        logger.warning("left out: %s", error)


class _Scan:
    """One pass over the dataset."""

    def __init__(self, dataset: TrajectoryDataset, columns: list[str], condition: pc.Expression | None) -> None:
        self._dataset = dataset
        self._columns = columns
        self._condition = condition
        self._tested = [] if condition is None else _referenced(condition)
        self._rewarded = bool(REWARDED & {*columns, *self._tested})

    def to_reader(self) -> pa.RecordBatchReader:
        """The rows, one batch a part."""
        wanted = pa.schema([SCHEMA.field(name) for name in self._columns])
        return pa.RecordBatchReader.from_batches(wanted, self._recorded(wanted))

    def _recorded(self, wanted: pa.Schema) -> Iterator[pa.RecordBatch]:
        try:
            for run, iteration in self._dataset.iterations():
                for rows, shard in self._iteration(run, iteration):
                    columns = [shard.column(name, rows) for name in self._columns]
                    yield pa.RecordBatch.from_arrays(columns, schema=wanted)
        except Exception as error:
            self._dataset.failure = error
            raise

    def _iteration(self, run: RunStore, iteration: int) -> Iterator[tuple[pa.Array | None, _Shard]]:
        known = {"run_id": run.run_id, "batch": iteration}
        if not self._possible(_equal(known)):
            return
        try:
            rollout = run.stage(iteration, Stage.ROLLOUT)
            if rollout is None:
                return
            manifest, _ = rollout
            rewards = _rewards(run, iteration) if self._rewarded else None
        except CorruptShardError as error:
            self._dataset.left_out(error)
            return
        if rewards is not None and len(rewards) >= manifest.rows and not self._possible(_range_of(rewards)):
            return
        for part in manifest.parts:
            yield from self._part(run, part, known, manifest, rewards)

    def _part(
        self, run: RunStore, part: Part, known: dict[str, Any], manifest: StageManifest, rewards: pa.Table | None
    ) -> Iterator[tuple[pa.Array | None, _Shard]]:
        known = {**known, "iteration": _iteration_of(part)}
        if not self._possible(_equal(known)):
            return
        try:
            shard = _Shard(run, part, known, rewards)
            rows = self._matching(shard, manifest.selected)
            if rows is None or len(rows):
                shard.load(self._columns)
                yield rows, shard
        except CorruptShardError as error:
            self._dataset.left_out(error)

    def _matching(self, shard: _Shard, selected: frozenset[str] | None) -> pa.Array | None:
        """The numbers of the rows that are of the batch and match; None: all."""
        if self._condition is None and selected is None:
            return None
        shard.load(self._tested if selected is None else [*self._tested, "group_id"])
        table = pa.table({name: shard.column(name, None) for name in self._tested} | {_ROW: shard.numbers})
        if selected is not None:
            table = table.filter(pc.is_in(shard.column("group_id", None), pa.array(sorted(selected), pa.string())))
        if self._condition is not None:
            table = table.filter(self._condition)
        return _ascending(table[_ROW])

    def _possible(self, known: pc.Expression) -> bool:
        """Whether a row of which ``known`` holds can match. Arrow decides, as it does for the statistics of a file."""
        if self._condition is None:
            return True
        fragment = _FORMAT.make_fragment(_NOTHING, partition_expression=known)
        return any(ds.FileSystemDataset([fragment], SCHEMA, _FORMAT).get_fragments(filter=self._condition))


class _Shard:
    """One part, verified, its columns decoded as they are asked for."""

    def __init__(self, run: RunStore, part: Part, known: dict[str, Any], rewards: pa.Table | None) -> None:
        self._run = run
        self._part = part
        self._data = run.read_part(part)
        self._rewards = rewards
        self._stored = {name: pa.repeat(pa.scalar(v, COLUMNS[name].kind), part.rows) for name, v in known.items()}

    @property
    def numbers(self) -> pa.Array:
        """0, 1, …, one a row."""
        return pa.array(np.arange(self._part.rows))

    def load(self, columns: Iterable[str]) -> None:
        """Decode what ``columns`` are made from, all at once."""
        needed = {source for name in columns for source in COLUMNS[name].sources}
        if self._rewards is not None:
            needed |= set(KEY)
        missing = [name for name in schema.TRAJECTORY.names if name in needed and name not in self._stored]
        if missing:
            table = self._run.decode_part(self._part, self._data, schema.TRAJECTORY, missing)
            self._stored |= {name: _whole(table[name]) for name in missing}
        if self._rewards is not None and f"{REWARD_PREFIX}status" not in self._stored:
            order = pc.index_in(_keys(self._stored), value_set=_whole(self._rewards[_JOINED]))
            for name in schema.REWARD.names:
                self._stored[f"{REWARD_PREFIX}{name}"] = _whole(self._rewards[name].take(order))

    def column(self, name: str, rows: pa.Array | None) -> pa.Array:
        """A loaded column, of these rows; None: all."""
        made = COLUMNS[name].make(self._stored)
        made = made if isinstance(made, pa.Array) else pa.array(made, COLUMNS[name].kind)
        return made if rows is None else made.take(rows)


_JOINED = "key"  # of a table of rewards: group and sample as one text


def _rewards(run: RunStore, iteration: int) -> pa.Table | None:
    """The rewards of an iteration, with the column ``key``; None if the stage is not complete."""
    found = run.stage(iteration, Stage.REWARD)
    if found is None:
        return None
    tables = [run.read_table(part, schema.REWARD) for part in found[0].parts]
    rewards = pa.concat_tables([schema.REWARD.empty_table(), *tables])
    return rewards.append_column(_JOINED, _keys({name: _whole(rewards[name]) for name in KEY}))


def _keys(columns: dict[str, pa.Array]) -> pa.Array:
    group, sample = (columns[name] for name in KEY)
    return pc.binary_join_element_wise(group, sample.cast(pa.string()), "/")


def _equal(known: dict[str, Any]) -> pc.Expression:
    """What is known of every row, as an expression."""
    return _all(pc.field(name) == pa.scalar(value, COLUMNS[name].kind) for name, value in known.items())


def _range_of(rewards: pa.Table) -> pc.Expression:
    """What is known of every row of a scored iteration, as an expression: least and greatest values, as for a file."""
    return _all(bound for name, column in _SCORED.items() for bound in _bounds(pc.field(name), _whole(rewards[column])))


_SCORED = {"reward": "reward", "score": "score", "reward_status": "status"}


def _bounds(field: pc.Expression, values: pa.Array) -> Collection[pc.Expression]:
    if values.null_count == len(values):
        return [field.is_null()]
    extremes = pc.min_max(values)
    low, high = extremes["min"], extremes["max"]
    bounds = [field == low] if low == high else [field >= low, field <= high]
    return [bound | field.is_null() for bound in bounds] if values.null_count else bounds


def _all(parts: Iterable[pc.Expression]) -> pc.Expression:
    whole, *others = parts
    for other in others:
        whole = whole & other
    return whole


def _referenced(condition: pc.Expression) -> list[str]:
    """The columns an expression looks at; one whose name a text of it holds is decoded for nothing, and no harm done."""
    words = set(re.findall(r"\w+", str(condition)))
    return [name for name in SCHEMA.names if name in words]


def _iteration_of(part: Part) -> int:
    """The iteration that sampled a part: the folder it lies in."""
    return int(part.path.split("/")[1])


def _ascending(rows: pa.ChunkedArray) -> pa.Array:
    return pa.array(np.sort(rows.to_numpy()))


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
