"""Rows through the ``datasets`` library: Parquet and Arrow files, ``save_to_disk`` folders, hub ids and clones of them.

The library is imported at the first call. Files are streamed, so nothing is copied into its cache.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from rlhf_core.data.values import Row
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

SAVED_DATASET = "state.json"  # written by Dataset.save_to_disk
SAVED_SPLITS = "dataset_dict.json"  # written by DatasetDict.save_to_disk


def read_table(path: Path) -> Iterator[Row]:
    """Rows of one ``.parquet`` or ``.arrow`` file (stream or file format)."""
    import datasets

    try:
        table = datasets.load_dataset(path.suffix[1:], data_files=str(path), split="train", streaming=True)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not readable as {path.suffix[1:]}: {error}; write the file again") from error
    return _rows(table, str(path))


def is_saved(folder: Path) -> bool:
    """True if ``save_to_disk`` wrote this folder."""
    return (folder / SAVED_DATASET).exists() or (folder / SAVED_SPLITS).exists()


def read_saved(folder: Path, split: str) -> Iterator[Row]:
    """Rows of a ``save_to_disk`` folder; ``split`` counts where it holds several."""
    import datasets

    saved = datasets.load_from_disk(str(folder))
    if not isinstance(saved, datasets.DatasetDict):
        return _rows(saved, str(folder))
    if split not in saved:
        raise DataError(_no_split(str(folder), f"no split {split!r}; available splits: {sorted(saved)}"))
    return _rows(saved[split], str(folder))


def read_hub(name: str, split: str, options: Mapping[str, str]) -> Iterator[Row]:
    """Rows of a dataset of the hub, or of a local folder laid out like one.

    Args:
        name: The id (``openai/gsm8k``) or the folder.
        split: As ``datasets`` reads it, slices included (``train[:1000]``).
        options: Any of ``name`` (the configuration), ``data_dir`` and ``revision``.

    Raises:
        DataError: It cannot be reached, or has no such split; the message lists the splits it has.
    """
    import datasets

    try:
        table = datasets.load_dataset(name, split=split, **options)
    except OSError as error:
        raise DataError(f"{name}: neither a file or folder here nor a hub dataset in reach: {error}") from error
    except ValueError as error:
        raise DataError(_no_split(name, str(error))) from error
    return _rows(table, name)


def _no_split(place: str, problem: str) -> str:
    return f"{place}: {problem}; set data.prompt_split (in a supervised run data.split; held out: eval.split) to one it has"


def _rows(table: Iterable[dict[str, Any]], name: str) -> Iterator[Row]:
    rows = iter(table)
    for number in itertools.count():
        place = f"{name}, row {number}"
        try:
            values = next(rows)
        except StopIteration:
            return
        except ValueError as error:  # pyarrow's, too: UnicodeDecodeError for text that is not UTF-8
            raise DataError(f"{place}: not readable: {error}; write the row again as UTF-8, or remove it") from error
        yield Row(number, place, values)
