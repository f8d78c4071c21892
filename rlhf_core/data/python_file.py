"""Rows made by a function of a Python file: ``tasks/digits.py:prompts?count=256&seed=1``.

The function is called once with the query's values as keyword arguments and returns or yields dicts. It must give the
same rows for the same arguments: a resumed run calls it again.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import yaml

from rlhf_core.data.values import Row
from rlhf_core.errors import DataError
from rlhf_core.user_file import module_from_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def read_function(path: Path, function: str, query: str) -> Iterator[Row]:
    """Rows of ``function`` in the file ``path``.

    Raises:
        DataError: No such file or function, or arguments it does not take.
        ConfigError: The file cannot be imported. An error of the function itself comes
            through with a note that names the file.
    """
    rows_of = _function(path, function)
    arguments = _arguments(query, f"{path}:{function}")
    try:
        inspect.signature(rows_of).bind(**arguments)
    except TypeError as error:
        raise DataError(
            f"{path}:{function}?{query}: {error}; its signature is {function}{inspect.signature(rows_of)}"
        ) from error
    return _rows(rows_of, arguments, f"{path}:{function}")


def _rows(rows_of: Callable[..., Any], arguments: dict[str, Any], name: str) -> Iterator[Row]:
    number = 0
    try:
        for number, values in enumerate(rows_of(**arguments)):
            place = f"{name}, row {number}"
            if not isinstance(values, dict):
                raise DataError(f"{place}: a {type(values).__name__} instead of a dict; yield rows as dicts")
            yield Row(number, place, values)
    except Exception as error:
        error.add_note(f"while reading the rows of {name}, after row {number}")
        raise


def _function(path: Path, function: str) -> Callable[..., Any]:
    if not path.is_file():
        raise DataError(f"{path}: no such file; give the path of the Python file that makes the rows")
    module = module_from_file(path.resolve(), f"{path}:{function}")
    found = getattr(module, function, None)
    if not callable(found):
        raise DataError(f"{path} has no function {function!r}; name one as {path}:function")
    return found  # type: ignore[no-any-return]


def _arguments(query: str, name: str) -> dict[str, Any]:
    """``count=256&split=test`` as {"count": 256, "split": "test"}: each value is read as YAML."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
        return {key: yaml.safe_load(value) for key, value in pairs}
    except (ValueError, yaml.YAMLError) as error:
        raise DataError(f"{name}?{query}: {error}; write the arguments as name=value&name=value") from error
