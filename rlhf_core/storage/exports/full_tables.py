"""Every column of the trajectories of a run, with their rewards, as Arrow tables that other software reads.

What only this project reads is made plain: metrics, which are maps, become JSON. All else is as in the shards, token ids and
log-probs too.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_core.records import Stage
from rlhf_core.storage.shards import schema

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from rlhf_core.records import RewardResult
    from rlhf_core.storage.run_store import RunStore

    Key = tuple[str, int]  # group, sample

FILE_BYTES = 256 * 2**20  # of values; a file is a little smaller on disk
_ADDED = (("reward_error", pa.string()), ("reward_metrics", pa.string()))


def full_tables(
    store: RunStore, iteration: int, keys: Collection[Key], rewards: Mapping[Key, RewardResult]
) -> Iterator[pa.Table]:
    """The chosen samples of an iteration, a table for each of its parts.

    Args:
        store: of the run.
        iteration: its number; its rollout is complete.
        keys: of the samples.
        rewards: of the reward stage, or of a rescoring; a sample without one keeps what its executor gave.

    Raises:
        CorruptShardError: a shard is missing or damaged.
    """
    found = store.stage(iteration, Stage.ROLLOUT)
    assert found is not None, "only complete iterations are asked for"
    for part in found[0].parts:
        table = store.read_table(part, schema.TRAJECTORY)
        mine = list(zip(table["group_id"].to_pylist(), table["sample_index"].to_pylist(), strict=True))
        table = table.filter(pa.array([key in keys for key in mine], pa.bool_()))
        yield _plain(table, [rewards.get(key) for key in mine if key in keys])


def write_parquet_files(tables: Iterator[pa.Table], folder: Path) -> int:
    """``data/train-00000-of-00002.parquet`` and so on: a folder that ``datasets.load_dataset`` reads. Returns the rows."""
    data = folder / "data"
    data.mkdir(parents=True)
    files: list[Path] = []
    writer: pq.ParquetWriter | None = None
    rows = size = 0
    try:
        for table in tables:
            if not len(table):
                continue
            if writer is None or size >= FILE_BYTES:
                if writer is not None:
                    writer.close()
                files.append(data / f"{len(files)}.parquet")
                writer, size = pq.ParquetWriter(files[-1], table.schema, compression="zstd"), 0
            writer.write_table(table)
            rows, size = rows + len(table), size + table.nbytes
    finally:
        if writer is not None:
            writer.close()
    for number, file in enumerate(files):
        file.rename(data / f"train-{number:05d}-of-{len(files):05d}.parquet")
    return rows


def _plain(table: pa.Table, results: list[RewardResult | None]) -> pa.Table:
    columns = {name: table[name] for name in table.column_names}
    columns["metrics"] = pa.array([_json(dict(pairs)) for pairs in table["metrics"].to_pylist()], pa.string())
    for name, attribute in (("reward", "reward"), ("score", "score"), ("reward_status", "status")):
        own = table[name].to_pylist()
        values = [own[i] if result is None else getattr(result, attribute) for i, result in enumerate(results)]
        columns[name] = pa.array(values, table.schema.field(name).type)
    added: dict[str, list[Any]] = {
        "reward_error": [None if result is None else result.error for result in results],
        "reward_metrics": [None if result is None else _json(result.metrics) for result in results],
    }
    columns |= {name: pa.array(added[name], kind) for name, kind in _ADDED}
    return pa.table(columns)


def _json(metrics: Mapping[str, float]) -> str:
    return json.dumps(metrics, ensure_ascii=False)
