"""From one entry of ``data.prompt_dataset`` to rows.

    data/train.jsonl                     .json, .jsonl, .csv: standard library; .parquet, .arrow: ``datasets``
    data/saved                           a folder of ``save_to_disk``, or a clone of a hub dataset
    openai/gsm8k?name=main               a hub id; options name, data_dir, revision
    tasks/digits.py:prompts?count=256    a function of a Python file
    env:gymnasium/Taxi-v4?size=256       environments, one a row (environments/spec.py)

Rows are counted from 0, and every refusal names file and row. Nothing is altered on the way.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from rlhf_core.data import environment_rows, huggingface, python_file, text_files
from rlhf_core.environments.spec import is_environment, parse_environment
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rlhf_core.data.values import Row

READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".json": text_files.read_json,
    ".jsonl": text_files.read_jsonl,
    ".csv": text_files.read_csv,
    ".parquet": huggingface.read_table,
    ".arrow": huggingface.read_table,
}
FUNCTION = re.compile(r"(?P<path>.+\.py):(?P<function>\w+)(\?(?P<query>.*))?", re.DOTALL)
HUB_ID = re.compile(r"(?P<name>[\w-][\w.-]*(/[\w-][\w.-]*)?)(\?(?P<query>.*))?")
HUB_OPTIONS = {"name", "data_dir", "revision"}


def read_rows(spec: str, split: str = "train") -> Iterator[Row]:
    """The rows of one dataset, in its own order.

    Args:
        spec: One entry of ``data.prompt_dataset``; see the top of this module.
        split: Used where the dataset has splits.

    Raises:
        DataError: The dataset or a row of it cannot be read; some errors come only when that row is reached.
    """
    if is_environment(spec):
        return environment_rows.read_environments(spec)
    function = FUNCTION.fullmatch(spec)
    if function is not None:
        return python_file.read_function(Path(function["path"]), function["function"], function["query"] or "")
    path = Path(spec)
    if path.suffix in READERS:
        return _read_file(path)
    if path.is_dir():
        return (
            huggingface.read_saved(path, split) if huggingface.is_saved(path) else huggingface.read_hub(spec, split, {})
        )
    hub = HUB_ID.fullmatch(spec)
    if hub is None or path.exists() or path.suffix == ".py":
        raise DataError(
            f"{spec!r} is not a dataset this version reads: give a file ({', '.join(READERS)}), a folder of "
            "save_to_disk, a hub id, path.py:function, or env:collection/name"
        )
    return huggingface.read_hub(hub["name"], split, _hub_options(spec, hub["query"] or ""))


def source_names(specs: Sequence[str]) -> list[str]:
    """A distinct name for each dataset: the file's stem or the id's last part; the whole spec where two are equal."""
    repeated = sorted({spec for spec in specs if specs.count(spec) > 1})
    if repeated:
        raise DataError(
            f"{', '.join(repeated)}: listed twice; list it once (data.prompt_probs, or data.probs, weighs datasets)"
        )
    short = [_short_name(spec) for spec in specs]
    return [name if short.count(name) == 1 else spec for name, spec in zip(short, specs, strict=True)]


def _short_name(spec: str) -> str:
    if is_environment(spec):
        return parse_environment(spec).datasource
    function = FUNCTION.fullmatch(spec)
    path = Path(function["path"] if function else spec.partition("?")[0])
    return path.stem if function or path.suffix in READERS else path.name


def _read_file(path: Path) -> Iterator[Row]:
    if not path.is_file():
        raise DataError(f"{path}: no such file (paths are relative to {Path.cwd()})")
    return READERS[path.suffix](path)


def _hub_options(spec: str, query: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(set(options) - HUB_OPTIONS)
    if unknown:
        raise DataError(
            f"{spec}: unknown options {', '.join(unknown)}; a hub id takes {', '.join(sorted(HUB_OPTIONS))}"
        )
    return options
