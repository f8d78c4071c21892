"""An object store: immutable objects, two kinds of pointers to them, and no open handles.

::

    put_once   conditional create: of many writers exactly one wins       manifests, leases
    put        atomic replace                                             parts named by their digest, pointers
    read       whole object

What makes a run recoverable is that ``put_once`` is *one* atomic act. ``probe`` checks that a store keeps to it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import fsspec
import pyarrow as pa

from rlhf_core.errors import ConfigError, ConflictError, StorageError
from rlhf_core.storage.backends.local import TEMPORARY_PREFIX, LocalBackend
from rlhf_core.storage.backends.remote import RemoteBackend
from rlhf_core.storage.backends.s3 import S3Backend

if TYPE_CHECKING:
    from collections.abc import Iterator

_FILE = "file://"
_S3_SCHEMES = ("s3:", "s3a:")


@dataclass(frozen=True)
class ObjectStore:
    """Objects below one root. Plain values only: it pickles, and may be used from any thread or process.

    Paths are relative, with ``/``. Errors: ``FileNotFoundError`` for an absent object, ``ConflictError`` for a lost
    ``put_once``, else ``StorageError`` with the act, the URL and the remedy.

    ``timeout`` bounds every act on a remote store, retries included; large objects get the time their bytes take at
    ``backends.remote.SLOWEST_BYTES_PER_SECOND`` on top. Local disks are not bounded: the kernel does not give up on
    them. ``memory://`` lives and is atomic within one process only: for tests.
    """

    root: str
    options: dict[str, Any] = field(default_factory=dict, repr=False)
    timeout: float = 60.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", _absolute(self.root))
        _check_protocol(self.root)

    def url(self, path: str) -> str:
        """The object's URL."""
        return f"{self.root}/{path}" if path else self.root

    def local_path(self, path: str) -> Path | None:
        """The object's file, if the store is a folder of this machine. Read it only."""
        return self._folder / _checked(path) if self._folder is not None else None

    def read(self, path: str) -> bytes:
        """The whole object."""
        with self._named("read", path):
            return self._backend.read(_checked(path))

    def view(self, path: str) -> memoryview:
        """The whole object, as ``read``. A file goes into memory that Arrow keeps for the next one: a fourth of the time."""
        local = self.local_path(path)
        if local is None:
            return memoryview(self.read(path))
        with self._named("read", path), pa.OSFile(str(local)) as file:
            return memoryview(file.read_buffer())

    def hashed(self, path: str) -> tuple[int, str]:
        """(bytes, hex sha256) of the object, read in pieces: however large, it is never in memory as a whole."""
        size, digest = 0, hashlib.sha256()
        with self._named("read", path):
            for piece in self._backend.pieces(_checked(path)):
                size += len(piece)
                digest.update(piece)
        return size, digest.hexdigest()

    def exists(self, path: str) -> bool:
        """True if there is such an object."""
        try:
            self.size(path)
        except FileNotFoundError:
            return False
        return True

    def size(self, path: str) -> int:
        """Bytes of the object."""
        with self._named("size", path):
            return self._backend.size(_checked(path))

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Every object below the folder ``prefix``, at any depth, and its bytes."""
        with self._named("list", prefix):
            return self._backend.sizes(_checked(prefix) if prefix else "")

    def modified(self, path: str) -> float:
        """Unix seconds of the object's last change."""
        with self._named("modified", path):
            return self._backend.modified(_checked(path))

    def half_written(self, older_than: float) -> dict[str, int]:
        """What no listing shows: objects whose writer died, or is still at it. Their names and bytes.

        Args:
            older_than: seconds since their last change: who writes, changes something.
        """
        with self._named("list", ""):
            found = self._backend.half_written()
        return {name: size for name, (size, changed) in found.items() if time.time() - changed > older_than}

    def discard(self, name: str) -> None:
        """Remove what ``half_written`` named; one that is gone is no error."""
        with suppress(FileNotFoundError), self._named("discard", name):
            self._backend.discard(name)

    def children(self, prefix: str = "") -> list[str]:
        """Names of the folders and objects directly below the folder ``prefix``, sorted."""
        with self._named("list", prefix):
            return sorted(self._backend.children(_checked(prefix) if prefix else ""))

    def list(self, prefix: str = "") -> list[str]:
        """Every object below the folder ``prefix``, at any depth, sorted."""
        return sorted(self.sizes(prefix))

    def put(self, path: str, data: bytes | memoryview) -> None:
        """Write or replace the object by one atomic act."""
        with self._named("put", path):
            self._backend.put(_checked(path), data)

    def put_once(self, path: str, data: bytes) -> None:
        """Create the object by one atomic act: of many writers exactly one wins.

        An existing object with the same bytes is success: it is our own, whose answer was lost.

        Raises:
            ConflictError: the object exists with other bytes.
        """
        try:
            with self._named("put_once", path):
                self._backend.create(_checked(path), data)
        except FileExistsError as error:
            if self.read(path) != data:
                raise ConflictError(f"{self.url(path)} exists already, with other contents") from error

    def delete(self, path: str) -> None:
        """Remove the object; an absent one is no error."""
        with self._named("delete", path):
            self._backend.delete(_checked(path))

    def remove_folder(self, path: str) -> None:
        """Remove a folder and all that is left in it, by many acts in no order; an absent one is no error.

        Also what no listing shows: empty folders, and what a writer that died left half written.
        """
        with self._named("remove_folder", path):
            self._backend.remove_folder(_checked(path))

    def put_file(self, local: Path, path: str, *, link: bool = False) -> None:
        """Write or replace the object with the contents of a local file, streamed.

        Args:
            local: A finished file.
            path: The object.
            link: In a store on the same disk, share the file's blocks and write nothing twice. The file must then never
                be changed in place; it may be deleted.
        """
        with self._named("put_file", path):
            self._backend.put_file(Path(local), _checked(path), link=link)

    def get_file(self, path: str, local: Path, *, link: bool = False) -> None:
        """Copy the object to a local file, streamed; the file appears whole or not at all.

        Args:
            path: The object.
            local: The file.
            link: From a store on the same disk, share the object's blocks and write nothing twice. The file must then
                never be changed in place; it may be deleted, and outlives the object.
        """
        local = Path(local)
        temporary = local.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")
        with self._named("get_file", path):
            local.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._backend.get_file(_checked(path), temporary, link=link)
                temporary.replace(local)
            finally:
                with suppress(FileNotFoundError):
                    temporary.unlink()

    def probe(self) -> None:
        """Check that this store can be written to, and that it refuses a second create of one object.

        Raises:
            StorageError: it cannot, or it does not.
        """
        path = f".probe/{uuid.uuid4().hex}"
        self.put_once(path, b"first")
        try:
            self._refuse_second_create(path)
        finally:
            self.delete(path)

    def _refuse_second_create(self, path: str) -> None:
        try:
            self.put_once(path, b"second")
        except ConflictError:
            return
        raise StorageError(
            f"{self.root} ignores conditional creates (If-None-Match: *): two writers could both believe they "
            "finished a stage. Use a store that keeps to them (AWS S3, SeaweedFS, a folder), or upgrade this one"
        )

    @property
    def _folder(self) -> Path | None:
        return Path(self.root.removeprefix(_FILE)) if self.root.startswith(_FILE) else None

    @property
    def _backend(self) -> LocalBackend | RemoteBackend:
        if self._folder is not None:
            return LocalBackend(self._folder)
        kind = S3Backend if self.root.startswith(_S3_SCHEMES) else RemoteBackend
        return kind(self.root, self.options, self.timeout)

    @contextmanager
    def _named(self, act: str, path: str) -> Iterator[None]:
        """Give every error of the act the URL it happened at."""
        try:
            yield
        except StorageError:
            raise
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{act} {self.url(path)}: no such object") from error
        except OSError as error:
            if act == "put_once" and isinstance(error, FileExistsError):
                raise
            raise StorageError(f"{act} {self.url(path)} failed: {_explained(error, act)}") from error


def _absolute(root: str) -> str:
    if "::" in root:
        raise ConfigError(f"storage root {root!r} chains file systems: name one URL, such as s3://bucket/prefix")
    if "://" not in root or root.startswith(("file://", "local://")):
        folder = Path(root.split("://", 1)[-1]).expanduser()
        return f"{_FILE}{os.path.abspath(folder)}"  # noqa: PTH100 - resolve() would follow links, which may move
    return root.rstrip("/")


def _check_protocol(root: str) -> None:
    protocol, _, place = root.partition("://")
    if root.startswith(_S3_SCHEMES) and not place.partition("/")[0]:
        raise ConfigError(f"storage root {root!r} names no bucket: use s3://bucket/prefix")
    try:
        fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        extra = "; install the extra: pip install 'rlhf-flow[s3]'" if protocol == "s3" else ""
        raise ConfigError(f"storage root {root!r} cannot be used: {error}{extra}") from error


def _checked(path: str) -> str:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\\" in path or "\0" in path:
        raise StorageError(f"object path {path!r} leaves its store: use a relative path without '..'")
    return pure.as_posix()


def _explained(error: OSError, act: str) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        if act == "get_file":
            return f"the disk it is copied to is full ({error.strerror}): free space there"
        return f"the disk is full ({error.strerror}); nothing was published. Free space or move storage.root"
    if isinstance(error, PermissionError):
        return f"{error}; give this user the right to write there, or choose another storage.root"
    return f"{type(error).__name__}: {error}"
