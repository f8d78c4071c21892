"""``data.only_rows``: the rows of the datasets that a run uses, by their ids, and which rows there are.

A list names its rows, so what a run trains on stays the same while its datasets grow.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_core.data import columns
from rlhf_core.data.sources import read_rows, source_names
from rlhf_core.errors import DataError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlhf_core.config.model import DataConfig, StorageConfig


@dataclass(frozen=True, slots=True)
class RowList:
    """Ids of rows, and the file they come from."""

    source: str
    row_ids: frozenset[str]

    def __contains__(self, row_id: str) -> bool:
        return row_id in self.row_ids

    def check_complete(self, found: int, max_samples: int | None) -> None:
        """Refuse data that lack a row of the list; with ``max_samples`` that cannot be told.

        Raises:
            DataError: They do, or the list is empty.
        """
        if found == 0 or (max_samples is None and found < len(self.row_ids)):
            raise DataError(
                f"data.only_rows={self.source} lists {len(self.row_ids)} rows, and the datasets have {found} of them: restore "
                "the others (a row without data.id_key is its dataset's name and number: append to a dataset, insert nothing)"
            )


def read_row_list(source: str, storage: StorageConfig) -> RowList:
    """The list at a path or URL.

    Raises:
        DataError: There is none, or it is no JSON list of texts.
    """
    from rlhf_core.storage import ObjectStore  # pyarrow, which importing this package must not load

    folder, slash, name = source.rpartition("/")
    root = ObjectStore(folder or slash or ".").root
    alike = root.partition("://")[0] == ObjectStore(storage.root).root.partition("://")[0]
    store = ObjectStore(root, dict(storage.options) if alike else {}, storage.timeout)
    try:
        listed = json.loads(store.read(name))
    except (FileNotFoundError, StorageError, ValueError) as error:
        raise DataError(f"data.only_rows={source}: cannot be read as a JSON list of row ids: {error}") from error
    if not isinstance(listed, list) or not all(isinstance(row_id, str) for row_id in listed):
        raise DataError(f'data.only_rows={source}: write a JSON list of row ids, such as ["prompts:0", "prompts:1"]')
    return RowList(source, frozenset(listed))


def row_ids(data: DataConfig) -> Iterator[str]:
    """The id of every row of ``data.prompt_dataset``, in order. Nothing else of a row is looked at.

    Raises:
        DataError: A dataset cannot be read, or a row has no id.
    """
    for spec, name in zip(data.prompt_dataset, source_names(data.prompt_dataset), strict=True):
        for row in read_rows(spec, data.prompt_split):
            yield columns.row_id(row, name, data.id_key)
