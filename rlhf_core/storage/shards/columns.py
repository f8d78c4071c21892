"""Columns of arrays and tuples, built and taken apart by whole buffers.

A list column is one flat buffer of values and the offsets of its rows::

    rows     [11, 12], [], [40]
    values   11 12 40
    offsets  0 2 2 3

So a shard costs one concatenation per column; nothing here loops over tokens.
"""

from __future__ import annotations

from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rlhf_core.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

_MOST_ITEMS = 2**31 - 1  # Arrow's list offsets are 32 bit


class Ragged:
    """``B`` arrays of different lengths as one flat array: ``values[offsets[i]:offsets[i + 1]]`` is row ``i``."""

    def __init__(self, column: str, rows: Sequence[NDArray[Any] | None], dtype: type[np.generic]) -> None:
        """Concatenate ``rows``.

        Args:
            column: What to call them in an error.
            rows: ``B`` one-dimensional arrays; None: no value.
            dtype: Of the values.
        """
        arrays = [np.asarray(() if row is None else row, dtype=dtype) for row in rows]
        self.lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))  # [B]
        self.offsets = _offsets(column, self.lengths)  # [B + 1]
        self.values = np.concatenate(arrays) if arrays else np.empty(0, dtype)  # [sum of lengths]
        self._missing = np.fromiter((row is None for row in rows), np.bool_, len(rows))  # [B]

    def to_arrow(self, kind: pa.DataType) -> pa.ListArray:
        """The list column."""
        mask = pa.array(self._missing) if self._missing.any() else None
        return pa.ListArray.from_arrays(self.offsets, pa.array(self.values), type=kind, mask=mask)

    def place(self, index: int) -> tuple[int, int]:
        """The row and the position within it of flat index ``index``."""
        row = int(np.searchsorted(self.offsets, index, side="right")) - 1
        return row, index - int(self.offsets[row])


def structs_to_arrow(column: str, rows: Sequence[Sequence[tuple[Any, ...]]], kind: pa.DataType) -> pa.ListArray:
    """``B`` tuples of equal named tuples as a list<struct> column."""
    offsets = _offsets(column, np.fromiter(map(len, rows), np.int64, len(rows)))
    fields = list(kind.value_type)
    turned = list(zip(*chain.from_iterable(rows), strict=True)) or [()] * len(fields)
    arrays = [pa.array(values, field.type) for values, field in zip(turned, fields, strict=True)]
    return pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays(arrays, fields=fields), type=kind)


def metrics_to_arrow(rows: Sequence[dict[str, float]], kind: pa.DataType) -> pa.Array:
    """``B`` mappings as a map column."""
    return pa.array([list(row.items()) for row in rows], kind)


def arrays_of(column: pa.ListArray) -> list[Any]:
    """The rows of a list column as read-only views of one buffer; None where the row is null."""
    values = column.values.to_numpy(zero_copy_only=True)
    offsets = column.offsets.to_pylist()
    rows: list[Any] = [values[start:end] for start, end in pairwise(offsets)]
    if column.null_count:
        rows = [row if valid else None for row, valid in zip(rows, column.is_valid().to_pylist(), strict=True)]
    return rows


def structs_of(column: pa.ListArray, make: Any) -> list[tuple[Any, ...]]:
    """The rows of a list<struct> column as tuples of ``make(...)``."""
    fields = [column.values.field(i).to_pylist() for i in range(column.type.value_type.num_fields)]
    items = list(map(make, *fields))
    offsets = column.offsets.to_pylist()
    return [tuple(items[start:end]) for start, end in pairwise(offsets)]


def metrics_of(column: pa.Array) -> list[dict[str, float]]:
    """The rows of a map column."""
    return [dict(pairs) for pairs in column.to_pylist()]


def _offsets(column: str, lengths: Iterable[int] | NDArray[np.int64]) -> NDArray[np.int32]:
    ends = np.cumsum(np.concatenate(([0], np.asarray(lengths, np.int64))))
    if ends[-1] > _MOST_ITEMS:
        raise StorageError(f"column {column}: {ends[-1]} items do not fit one shard (at most {_MOST_ITEMS}): split it")
    return ends.astype(np.int32)
