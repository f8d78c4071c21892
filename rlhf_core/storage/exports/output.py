"""A file or a folder that people name, local or on an object store: whole or not at all, and never over something else.

::

    staged beside it (or in a temporary folder) ─▶ published ─▶ NAME.provenance.json, last: what it was made from

A local folder appears by one rename. On an object store its files appear one by one: there it is complete once the provenance
is there.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import ConfigError, StorageError
from rlhf_core.storage.digest import sha256_of_file
from rlhf_core.storage.object_store import ObjectStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SUFFIX = ".provenance.json"
WRITTEN_BY = "rlhf export"


@dataclass(frozen=True)
class Output:
    """Where something goes."""

    url: str  # a path, or a URL of an object store
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def check_free(self, overwrite: bool) -> None:
        """Refuse to write over anything but an earlier output of ours, and over that only where it is wanted.

        Raises:
            ConfigError: it says what is there, and what to do.
        """
        if not self._name:
            raise ConfigError(f"--output {self.url!r} names no file or folder")
        if not self._exists:
            return
        if not overwrite:
            raise ConfigError(f"{self.place} is there already: choose another --output, or replace it with --overwrite")
        if self.read_provenance() is None:
            raise ConfigError(
                f"{self.place} has no {self._name}{SUFFIX} beside it, so it was not written by rlhf export and is not "
                "replaced: remove it, or choose another --output"
            )

    @property
    def place(self) -> str:
        """Its URL."""
        return self._store.url(self._name)

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A folder of this machine in which it is made; for a local output on the same disk. Gone afterwards."""
        local = self._store.local_path(self._name)
        try:
            if local is not None:
                local.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".rlhf-export-", dir=local.parent if local else None) as folder:
                yield Path(folder)
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(f"{self.place} cannot be written: {error}; nothing of it was published") from error

    def publish(self, staged: Path, provenance: Mapping[str, Any]) -> None:
        """Put a finished file or folder into its place, and then what it was made from beside it.

        What ``check_free`` allowed to be replaced is replaced.
        """
        self._store.delete(f"{self._name}{SUFFIX}")  # of what is replaced: it must not speak for the new one
        local = self._store.local_path(self._name)
        if staged.is_file():
            self._store.put_file(staged, self._name, link=True)
        elif local is not None:
            if local.exists():
                local.rename(staged.with_name("replaced"))  # goes with the staging folder
            staged.rename(local)
        else:
            self._store.remove_folder(self._name)
            for path in sorted(path for path in staged.rglob("*") if path.is_file()):
                self._store.put_file(path, f"{self._name}/{path.relative_to(staged).as_posix()}")
        body = json.dumps(
            {"written_by": WRITTEN_BY, **provenance, "output": self.place}, indent=1, ensure_ascii=False, sort_keys=True
        )
        self._store.put(f"{self._name}{SUFFIX}", f"{body}\n".encode())

    def read_provenance(self) -> dict[str, Any] | None:
        """What it was made from; None if nothing of ours says so."""
        try:
            body = json.loads(self._store.read(f"{self._name}{SUFFIX}"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise StorageError(f"{self.place}{SUFFIX} is not readable as JSON: {error}; remove it") from error
        return body if isinstance(body, dict) and body.get("written_by") == WRITTEN_BY else None

    @property
    def _store(self) -> ObjectStore:
        parent, slash, _ = self.url.rstrip("/").rpartition("/")
        return ObjectStore(parent if slash and parent else "/" if slash else ".", dict(self.options))

    @property
    def _name(self) -> str:
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def _exists(self) -> bool:
        local = self._store.local_path(self._name)
        if local is not None:
            return local.exists() or local.is_symlink()
        return self._store.exists(self._name) or bool(self._store.children(self._name))


def exports_among(datasets: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The datasets that ``rlhf export`` wrote, and what each was made from, in short: for run.json.

    Args:
        datasets: as a configuration names them; those that are no file or folder of this machine were not written by it.
    """
    return {dataset: made for dataset in datasets if (made := _export_at(dataset)) is not None}


def _export_at(dataset: str) -> dict[str, Any] | None:
    path = Path(dataset)
    if not path.exists():
        return None
    made = Output(dataset).read_provenance()
    if made is None:
        return None
    iterations = made["choice"]["iterations"]
    return {
        "source_url": made["source"]["url"],
        "iterations": [iterations[0], iterations[-1]],
        "created_at": made["created_at"],
        "rescored": made["rescored"],
        "choice": {name: value for name, value in made["choice"].items() if name != "iterations"},
        "files": made["files"],
        "altered": file_digests(path) != made["files"],
    }


def file_digests(path: Path) -> dict[str, str]:
    """sha256 of every file of a folder, by its place in it; of a single file under the name ``""``."""
    if path.is_file():
        return {"": sha256_of_file(path)}
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {file.relative_to(path).as_posix(): sha256_of_file(file) for file in files}
