"""Objects as files of one folder.

::

    write ─▶ temporary name in the same folder ─▶ fsync ─▶ os.replace (put) or os.link (create) ─▶ fsync of the folder

A reader sees an object whole or not at all. ``os.link`` fails if the name exists, on network file systems too: that is
the conditional create.
"""

from __future__ import annotations

import os
import shutil
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

TEMPORARY_PREFIX = ".writing-"  # a crashed writer leaves such a file behind; no listing shows it
PIECE = 2**20  # bytes that are read at once of a file of any size


class LocalBackend:
    """The acts of an object store on a folder. Every method raises plain ``OSError`` kinds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, name: str) -> Path:
        """Where the object lies."""
        return self._folder / name

    def read(self, name: str) -> bytes:
        """The whole object."""
        return self.path(name).read_bytes()

    def pieces(self, name: str) -> Iterator[bytes]:
        """The object, a piece at a time."""
        with self.path(name).open("rb") as file:
            while piece := file.read(PIECE):
                yield piece

    def size(self, name: str) -> int:
        """Bytes of the object."""
        path = self.path(name)
        if not path.is_file():
            raise FileNotFoundError(name)
        return path.stat().st_size

    def sizes(self, prefix: str) -> dict[str, int]:
        """Every object below ``prefix`` and its bytes."""
        found: dict[str, int] = {}
        for folder, _, files in os.walk(self.path(prefix)):
            for file in files:
                path = Path(folder, file)
                if not file.startswith(TEMPORARY_PREFIX):
                    with suppress(FileNotFoundError):  # deleted while the others were looked at
                        found[path.relative_to(self._folder).as_posix()] = path.stat().st_size
        return found

    def children(self, prefix: str) -> list[str]:
        """Names of the folders and objects directly below ``prefix``."""
        folder = self.path(prefix)
        if not folder.is_dir():
            return []
        return [entry.name for entry in folder.iterdir() if not entry.name.startswith(TEMPORARY_PREFIX)]

    def modified(self, name: str) -> float:
        """Unix seconds of the object's last change."""
        return self.path(name).stat().st_mtime

    def half_written(self) -> dict[str, tuple[int, float]]:
        """Temporaries, of writers that are at it or died: name -> (bytes, unix seconds of the last change)."""
        found: dict[str, tuple[int, float]] = {}
        for folder, _, files in os.walk(self._folder):
            for path in (Path(folder, file) for file in files if file.startswith(TEMPORARY_PREFIX)):
                with suppress(FileNotFoundError):
                    stat = path.stat()
                    found[path.relative_to(self._folder).as_posix()] = (stat.st_size, stat.st_mtime)
        return found

    def discard(self, name: str) -> None:
        """Remove what ``half_written`` named."""
        self.delete(name)

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Replace the object by one atomic act."""
        with self._temporary(name) as temporary:
            _write_durably(temporary, data)
            temporary.replace(self.path(name))

    def create(self, name: str, data: bytes) -> None:
        """Create the object by one atomic act; ``FileExistsError`` if it exists."""
        with self._temporary(name) as temporary:
            _write_durably(temporary, data)
            os.link(temporary, self.path(name))

    def put_file(self, local: Path, name: str, *, link: bool) -> None:
        """Replace the object by the contents of ``local``; ``link``: share its disk blocks where the disk allows."""
        with self._temporary(name) as temporary:
            if not (link and _linked(local, temporary)):
                shutil.copyfile(local, temporary)
            _sync(temporary)
            temporary.replace(self.path(name))

    def get_file(self, name: str, local: Path, *, link: bool) -> None:
        """Copy the object to ``local``; ``link``: share its disk blocks where the disk allows."""
        if not (link and _linked(self.path(name), local)):
            shutil.copyfile(self.path(name), local)

    def delete(self, name: str) -> None:
        """Remove the object. Its folder stays: another writer may be about to use it."""
        self.path(name).unlink(missing_ok=True)

    def remove_folder(self, name: str) -> None:
        """Remove the folder and all that is left in it, temporaries too."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self.path(name))

    @contextmanager
    def _temporary(self, name: str) -> Iterator[Path]:
        """A free name beside the object's own, gone afterwards whatever happened; the folder is on disk afterwards."""
        target = self.path(name)
        temporary = target.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")
        self._make_folder(target.parent)
        try:
            yield temporary
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()
        _sync(target.parent)

    def _make_folder(self, folder: Path) -> None:
        """Make the folder, and put the names of the new ones on disk."""
        missing = [f for f in (folder, *folder.parents) if not f.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for made in missing:
            _sync(made.parent)


def _write_durably(path: Path, data: bytes | memoryview) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _linked(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        return False
    return True


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
