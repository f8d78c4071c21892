"""What a row is, and which values of it can be kept unchanged.

Everything a run logs is JSON or UTF-8 text. A value that is neither could only be stored by altering it, so it is
refused, with the row's place and the remedy. NUL, right-to-left text, combining marks and lines of any length are kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rlhf_core.errors import DataError


@dataclass(frozen=True, slots=True)
class Row:
    """One row of one dataset, as read."""

    number: int  # within its dataset, from 0
    place: str  # "data/train.csv, row 3 (line 5)": for messages
    values: dict[str, Any]


def check_text(text: str, column: str, place: str) -> None:
    """Raise ``DataError`` if ``text`` has no UTF-8 form.

    Text files are decoded with ``surrogateescape``, so a byte that was not UTF-8 arrives here as a lone surrogate too.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}: column {column!r} holds {text[error.start]!r} at character {error.start}: a byte that is not "
            "UTF-8, or half of a surrogate pair; save the data as UTF-8, or remove the row"
        ) from error


def check_json(value: Any, column: str, place: str) -> None:
    """Raise ``DataError`` unless JSON keeps ``value`` and its type: null, bool, int, finite float, str, list, dict."""
    if isinstance(value, str):
        check_text(value, column, place)
    elif isinstance(value, list):
        for item in value:
            check_json(item, column, place)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise _not_json(key, column, place)
            check_text(key, column, place)
            check_json(item, column, place)
    elif not _is_number_or_null(value):
        raise _not_json(value, column, place)


def _is_number_or_null(value: Any) -> bool:
    return value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))


def _not_json(value: Any, column: str, place: str) -> DataError:
    return DataError(
        f"{place}: column {column!r} holds {value!r} of type {type(value).__name__}, which JSON cannot keep unchanged; "
        "store it as null, a bool, a finite number, text, a list or a dict with text keys"
    )
