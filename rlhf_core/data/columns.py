"""The columns of one row: present, of the right type, and kept unchanged, or refused with the row's place and the remedy."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

from rlhf_core.data.values import check_json, check_text
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from rlhf_core.data.templates import Messages
    from rlhf_core.data.values import Row

DATASOURCE_COLUMN = "datasource"  # names the source of a single row; wins over the dataset's name


def column(row: Row, name: str, key: str, remedy: str) -> Any:
    """The value of column ``name``, which the configuration key ``key`` asks for."""
    if name not in row.values:
        raise DataError(f"{row.place}: no column {name!r} ({key}); it has {', '.join(row.values) or 'none'}: {remedy}")
    return row.values[name]


def text_or_messages(row: Row, name: str, key: str, noun: str) -> str | Messages:
    """Text, or a list of chat messages; neither may be blank.

    Args:
        row: The row.
        name: Its column.
        key: The configuration key that names the column.
        noun: What the column holds, for messages: "prompt".
    """
    content = column(row, name, key, f"set {key} to the {noun}'s column")
    if isinstance(content, str):
        check_text(content, name, row.place)
        blank = is_blank(content)
    else:
        blank = all(is_blank(message.get("content")) for message in _messages(content, name, row.place, noun))
    if blank:
        raise DataError(f"{row.place}: column {name!r} is empty or only white space: fill or remove the row")
    return cast("str | Messages", content)


def is_blank(content: Any) -> bool:
    """True for no content, and for text of nothing but white space."""
    return not (content.strip() if isinstance(content, str) else content)


def tools(row: Row, name: str) -> list[Any] | None:
    """The row's tool schemas: a list, or its JSON text (an Arrow column cannot hold schemas of unlike shapes)."""
    schemas = row.values.get(name)
    if isinstance(schemas, str) and schemas:
        try:
            schemas = json.loads(schemas)
        except ValueError as error:
            raise DataError(f"{row.place}: column {name!r} is not readable as JSON: {error}; repair it") from error
    if not schemas:
        return None
    if not isinstance(schemas, list):
        raise DataError(f"{row.place}: column {name!r} holds a {type(schemas).__name__}: give a list of tool schemas")
    check_json(schemas, name, row.place)
    return schemas


def row_id(row: Row, source: str, id_key: str | None) -> str:
    """The value of ``data.id_key``; without one the datasource's name and the row's number."""
    if id_key is None:
        return f"{source}:{row.number}"
    value = column(row, id_key, "data.id_key", "name the id's column, or set it to null to number the rows")
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise DataError(f"{row.place}: column {id_key!r} holds {value!r}: a row id is text or a whole number")
    check_text(str(value), id_key, row.place)
    return str(value)


def datasource(row: Row, source: str) -> str:
    """The row's own datasource where it names one, else its dataset's."""
    value = row.values.get(DATASOURCE_COLUMN, source)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{row.place}: column {DATASOURCE_COLUMN!r} holds {value!r}: write the source's name")
    check_text(value, DATASOURCE_COLUMN, row.place)
    return value


def _messages(content: Any, name: str, place: str, noun: str) -> Messages:
    check_json(content, name, place)
    if not isinstance(content, list):
        article = "an" if noun[0] in "aeiou" else "a"
        raise DataError(
            f"{place}: column {name!r} holds a {type(content).__name__}: {article} {noun} is text, or a list of chat "
            "messages"
        )
    for message in content:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(
                f'{place}: column {name!r} holds the message {message!r}: write {{"role": ..., "content": ...}}'
            )
    return content
