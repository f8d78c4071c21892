"""Arrow tables ⇄ the bytes of an Arrow IPC file, in whatever version of the schema they were written.

::

    pa.Table ─ zstd level 1, batches of 256 rows ─▶ bytes
    bytes ─▶ name and version of the table ─ columns it did not have yet get their default ─▶ pa.Table

The file format, not the stream format: a stream cut at a batch border reads as a shorter one without an error.
Compression has no checksum worth the name, so whoever stores the bytes records their sha256 (``run_store``).
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from rlhf_core.errors import CorruptShardError, StorageError
from rlhf_core.storage.shards import schema

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCH_ROWS = 256  # larger compresses no better and with less parallelism; smaller pays for itself only in random access


@dataclass(frozen=True, slots=True)
class Encoded:
    """A shard, ready to be stored."""

    data: memoryview
    sha256: str


def encode_table(table: pa.Table) -> Encoded:
    """The bytes of a shard. Each batch is hashed on another core while the next one is compressed."""
    batches = table.to_batches(max_chunksize=BATCH_ROWS)
    space = pa.allocate_buffer(_most_bytes(table, len(batches)))
    view, sink, digest, done = memoryview(space), pa.FixedSizeBufferWriter(space), hashlib.sha256(), 0
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1))
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="sha256") as thread:
        with pa.ipc.new_file(sink, table.schema, options=options) as writer:
            for batch in batches:
                writer.write_batch(batch)
                thread.submit(digest.update, view[done : sink.tell()])
                done = sink.tell()
        thread.submit(digest.update, view[done : sink.tell()])
    return Encoded(view[: sink.tell()], digest.hexdigest())


def decode_table(data: bytes | memoryview, expected: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    """One shard as an Arrow table of the present schema; only ``columns`` are decompressed where they are given.

    Raises:
        CorruptShardError: these are not the bytes of such a table.
        StorageError: a newer version of this software wrote it.
    """
    wanted = expected.names if columns is None else list(columns)
    try:
        found = pa.ipc.open_file(pa.BufferReader(data)).schema
        stored = _stored_columns(found, expected, wanted)
        options = pa.ipc.IpcReadOptions(included_fields=[found.get_field_index(name) for name in stored or found.names])
        table = pa.ipc.open_file(pa.BufferReader(data), options=options).read_all()
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, StorageError):
            raise
        raise CorruptShardError(f"not a whole {_table_name(expected)} shard: {error}") from error
    kept = {name: table[name] if name in stored else _default(expected, name, len(table)) for name in wanted}
    return pa.table(kept, schema=pa.schema([expected.field(name) for name in wanted], metadata=found.metadata))


def _most_bytes(table: pa.Table, batches: int) -> int:
    """No shard of the table is longer. Memory that is never written to costs nothing.

    zstd adds at most 1/256 and 64 bytes to a buffer, Arrow a length, padding and an entry in the batch's head; a column of
    ours has at most 8 buffers (a list of structs of three).
    """
    heads = (batches + 2) * (len(table.schema) * 8 * 256 + 4096)
    return int(table.nbytes * (1 + 1 / 128)) + heads + len(table.schema.serialize()) * 2


def _stored_columns(found: pa.Schema, expected: pa.Schema, wanted: Sequence[str]) -> list[str]:
    """Those of ``wanted`` that a shard of its version has, after a look at what it is."""
    name, version = _table_name(found), _version(found)
    if name != _table_name(expected):
        raise CorruptShardError(f"expected a {_table_name(expected)} shard, found {name!r}")
    if version > schema.SCHEMA_VERSION:
        raise StorageError(
            f"{name} shard has schema version {version}; this software reads up to {schema.SCHEMA_VERSION}: upgrade it"
        )
    later = {column for column, added in schema.ADDED.get(name, {}).items() if added.version > version}
    if missing := [column for column in expected.names if column not in later and column not in found.names]:
        raise CorruptShardError(f"{name} shard of schema version {version} lacks the columns {missing}")
    stored = [column for column in wanted if column not in later]
    for column in stored:
        if found.field(column).type != expected.field(column).type:
            raise CorruptShardError(
                f"{name} shard: column {column} is {found.field(column).type}, expected {expected.field(column).type}"
            )
    return stored


def _default(expected: pa.Schema, name: str, rows: int) -> pa.Array:
    """What a column holds in a shard that is older than the column."""
    value = schema.ADDED[_table_name(expected)][name].default
    return pa.array([value] * rows, expected.field(name).type)


def _table_name(table: pa.Schema) -> str:
    name: bytes = (table.metadata or {}).get(schema.TABLE_KEY, b"unknown")
    return name.decode(errors="replace")


def _version(found: pa.Schema) -> int:
    text = (found.metadata or {}).get(schema.VERSION_KEY, b"none").decode(errors="replace")
    if not text.isdecimal():
        raise CorruptShardError(f"{_table_name(found)} shard has schema version {text!r}, which is no number")
    return int(text)
