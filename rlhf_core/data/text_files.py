"""Rows of JSON, JSON Lines and CSV files, with the standard library: no type is guessed and no text is altered.

Files are UTF-8, with or without a byte order mark. Other bytes come through as lone surrogates, which ``check_text``
refuses with the row at hand, where the column is used.
"""

from __future__ import annotations

import csv
import json
import sys
from typing import TYPE_CHECKING, Any, TextIO

from rlhf_core.data.values import Row
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def read_json(path: Path) -> Iterator[Row]:
    """Rows of a file that holds one JSON list of objects, or JSON Lines under the name ``.json``."""
    with _open(path) as file:
        text = file.read()
    if not text.lstrip().startswith("["):
        yield from read_jsonl(path)
        return
    for number, value in enumerate(_parse(text, str(path))):
        place = f"{path}, row {number}"
        yield Row(number, place, _object(value, place))


def read_jsonl(path: Path) -> Iterator[Row]:
    """Rows of a file with one JSON object a line. Blank lines hold no row."""
    number = 0
    with _open(path) as file:
        for line_number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}, row {number} (line {line_number})"
            yield Row(number, place, _object(_parse(line, place), place))
            number += 1


def read_csv(path: Path) -> Iterator[Row]:
    """Rows of a CSV file with a header line, in the excel dialect. Every value is text, "7" too."""
    csv.field_size_limit(sys.maxsize)  # the default refuses fields over 128 KiB
    with _open(path) as file:
        reader = csv.reader(file, strict=True)
        header = _header(path, reader)
        for number, (place, fields) in enumerate(_records(path, reader)):
            if len(fields) != len(header):
                raise DataError(
                    f"{place}: {len(fields)} fields under a header of {len(header)} ({', '.join(header)}); "
                    'quote fields that hold commas or line breaks, and write an empty one as ""'
                )
            yield Row(number, place, dict(zip(header, fields, strict=True)))


def _open(path: Path) -> TextIO:
    # newline="\n": no translation, and no other character ends a line (csv and JSON have their own rules for them)
    return path.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n")


def _header(path: Path, reader: Iterator[list[str]]) -> list[str]:
    header = next(reader, [])
    repeated = sorted({name for name in header if header.count(name) > 1})
    if repeated:
        raise DataError(f"{path}: the header names {', '.join(repeated)} more than once; rename the columns")
    return header


def _records(path: Path, reader: Any) -> Iterator[tuple[str, list[str]]]:
    """(place, fields) of each record; blank lines count as records of no fields, except at the end of the file."""
    blank: list[tuple[str, list[str]]] = []
    number = 0
    while True:
        place = f"{path}, row {number} (line {reader.line_num + 1})"
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(f"{place}: not readable as CSV: {error}; repair the quotes of the row") from error
        number += 1
        if not fields:
            blank.append((place, fields))
            continue
        yield from blank
        blank.clear()
        yield place, fields


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique_keys)
    except ValueError as error:
        raise DataError(f"{place}: not readable as JSON: {error}; repair it, or remove it") from error


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f'{place}: a JSON {type(value).__name__} instead of an object; write it as {{"input": ...}}')
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"an object repeats one of its keys {', '.join(repr(key) for key, _ in pairs)}")
    return values
