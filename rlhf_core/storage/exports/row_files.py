"""Rows of plain values as a file: JSON Lines, or Parquet. Written a batch at a time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SUFFIXES = (".jsonl", ".parquet")
MESSAGES = pa.list_(pa.struct([pa.field("role", pa.string()), pa.field("content", pa.string())]))
KINDS: dict[str, pa.DataType] = {
    "text": pa.string(),
    "number": pa.float64(),
    "count": pa.int64(),
    "messages": MESSAGES,
}


class RowFile:
    """A file that grows by rows. Close it, whatever happens."""

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        """Begin a file.

        Args:
            path: ends with one of ``SUFFIXES``.
            columns: name -> one of ``KINDS``.
        """
        self.rows = 0
        self._columns = columns
        self._text = path.open("w", encoding="utf-8", newline="\n") if path.suffix == ".jsonl" else None
        self._schema = pa.schema([pa.field(name, KINDS[kind]) for name, kind in columns.items()])
        self._parquet = None if self._text else pq.ParquetWriter(path, self._schema, compression="zstd")

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add rows; each has every column.

        Raises:
            ConfigError: messages that Parquet has no column for.
        """
        if not rows:
            return
        self.rows += len(rows)
        if self._text is not None:
            self._text.writelines(f"{json.dumps(row, ensure_ascii=False, allow_nan=False)}\n" for row in rows)
            return
        for name in (name for name, kind in self._columns.items() if kind == "messages"):
            for row in rows:
                _check_messages(row[name], name)
        assert self._parquet is not None, "one of the two is open"
        self._parquet.write_table(pa.Table.from_pylist(list(rows), schema=self._schema))

    def close(self) -> None:
        """Finish the file."""
        for file in (self._text, self._parquet):
            if file is not None:
                file.close()


def _check_messages(messages: list[dict[str, Any]], name: str) -> None:
    for message in messages:
        if set(message) != {"role", "content"} or not isinstance(message["content"], str):
            raise ConfigError(
                f"column {name!r}: Parquet has no column for the message {message!r}, which is more than a role and a text: "
                "write .jsonl, or the rendered prompts with --plain-prompts"
            )
