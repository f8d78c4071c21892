"""Snapshots of the training state: visible only when complete.

::

    rank 0 ─ add_files ─┐
    rank 1 ─ add_files ─┼─▶ files ─▶ commit: checkpoint.json, last, with every file's size and sha256 ─▶ visible
    rank n ─ add_files ─┘

A crash before ``commit`` leaves files that no reader looks at. A checkpoint one of whose files is missing or short is
passed over, with a warning that says what is missing, and the one before it is used. ``delete`` goes the other way round:
checkpoint.json first.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf_core.errors import ConflictError, CorruptShardError, StorageError
from rlhf_core.storage.digest import sha256_of, sha256_of_file
from rlhf_core.storage.documents import decode_document, encode_document
from rlhf_core.storage.parallel import in_parallel
from rlhf_core.storage.paths import checkpoint_folder
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rlhf_core.storage.run_store import RunStore

logger = get_logger(__name__)

MARKER = "checkpoint.json"
TRANSFERS = 4  # files under way at once; each is itself sent in parallel parts where it is large
_CHECKPOINTS = "checkpoints"
_FILES = "files"
_VERSION_NAME = re.compile(r"v(\d{8,})")

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    path: str  # relative to the checkpoint's folder
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Held:
    """What is stored of one version."""

    version: int
    bytes: int
    complete: bool


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of a run, by policy version. Pickles; any rank may hold one."""

    run_store: RunStore

    def url(self, version: int) -> str:
        """Where the checkpoint of a version lies, or would."""
        return self.run_store.url_of(checkpoint_folder(version))

    def add_files(self, version: int, local_dir: Path, prefix: str = "") -> list[FileEntry]:
        """Upload every file below ``local_dir``; nothing is visible until ``commit``.

        ``local_dir`` is handed over: a store on the same disk shares its files' blocks instead of writing them twice,
        so they may be deleted afterwards but never changed in place.

        Args:
            version: The policy version of the checkpoint.
            local_dir: Finished files. Each rank has its own.
            prefix: Folder below the checkpoint's, such as ``model`` or ``rank0``.

        Raises:
            ConflictError: the checkpoint is complete already.
        """
        if self.run_store.objects.exists(_path(version, MARKER)):
            raise ConflictError(f"{self.url(version)} is complete already: its files never change")
        local_dir = Path(local_dir)
        files = sorted(path for path in local_dir.rglob("*") if path.is_file())

        def add(local: Path) -> FileEntry:
            name = "/".join(filter(None, (prefix, local.relative_to(local_dir).as_posix())))
            entry = FileEntry(name, local.stat().st_size, sha256_of_file(local))
            self.run_store.objects.put_file(local, _path(version, name), link=True)
            return entry

        return _transferred(add, files)

    def commit(self, version: int, body: dict[str, Any], files: Sequence[FileEntry]) -> None:
        """Make the checkpoint visible.

        Args:
            version: The policy version.
            body: What the checkpoint says of itself: data position, scheduler, digest.
            files: The entries of all ranks.

        Raises:
            StorageError: a file is not there whole.
            ConflictError: the checkpoint is complete already, with other contents.
        """
        marker = _path(version, MARKER)
        absent = _absent(files, self._sizes(version))
        if absent:
            raise StorageError(f"{self.url(version)} cannot be completed: {absent}")
        listed = [asdict(entry) for entry in sorted(files, key=lambda entry: entry.path)]
        document = encode_document({**body, _FILES: listed}, self.run_store.url_of(marker))
        self.run_store.objects.put_once(marker, document)

    def newest(self, up_to: int | None = None) -> tuple[int, dict[str, Any]] | None:
        """The newest complete checkpoint (of a version up to ``up_to``) and its body (with ``files``); None without one.

        Incomplete ones are passed over with a warning.
        """
        for version in reversed(self._begun()):
            if up_to is not None and version > up_to:
                continue
            try:
                return version, self._complete_body(version)
            except CorruptShardError as error:
                logger.warning("checkpoint passed over: %s", error)
        return None

    def get(self, version: int) -> dict[str, Any] | None:
        """The body of checkpoint.json (with ``files``); None if the checkpoint is not complete."""
        marker = _path(version, MARKER)
        try:
            data = self.run_store.objects.read(marker)
        except FileNotFoundError:
            return None
        return decode_document(data, self.run_store.url_of(marker))

    def versions(self) -> list[int]:
        """The versions that have a checkpoint.json, ascending."""
        return [version for version in self._begun() if self.run_store.objects.exists(_path(version, MARKER))]

    def held(self) -> list[Held]:
        """Every version of which anything is stored, ascending: complete ones, and what a crash left of others."""
        sizes: dict[int, dict[str, int]] = {version: {} for version in self._begun()}
        for path, size in self.run_store.objects.sizes(_CHECKPOINTS).items():
            folder, _, name = path.removeprefix(f"{_CHECKPOINTS}/").partition("/")
            if match := _VERSION_NAME.fullmatch(folder):
                sizes.setdefault(int(match[1]), {})[name] = size
        return [
            Held(version, sum(found.values()), self._is_complete(version, found))
            for version, found in sorted(sizes.items())
        ]

    def delete(self, version: int) -> None:
        """Remove what is stored of a version, complete or not.

        checkpoint.json goes first: what a crash in the middle leaves is never taken for a checkpoint.
        """
        objects = self.run_store.objects
        objects.delete(_path(version, MARKER))
        _transferred(objects.delete, objects.list(checkpoint_folder(version)))
        objects.remove_folder(checkpoint_folder(version))

    def files(self, version: int, prefix: str = "") -> list[FileEntry]:
        """The files of a complete checkpoint below ``prefix``; ``CorruptShardError`` if it is not complete."""
        return _entries(self._complete_body(version), prefix)

    def download(self, version: int, local_dir: Path, prefix: str = "", *, link: bool = False) -> None:
        """Copy the files below ``prefix`` into ``local_dir``, without the prefix, and verify each.

        With ``link`` a store on the same disk shares its files' blocks: they may be deleted afterwards, here or there, but
        never changed in place.

        Raises:
            CorruptShardError: a file is missing or is not the one recorded. It names the object.
        """

        def fetch(entry: FileEntry) -> None:
            local = Path(local_dir) / entry.path.removeprefix(prefix).lstrip("/")
            self.run_store.objects.get_file(_path(version, entry.path), local, link=link)
            self._verify(version, entry, local)

        _transferred(fetch, self.files(version, prefix))

    def open_folder(self, version: int, staging: Path, prefix: str = "") -> Path:
        """A folder of this machine with the verified files below ``prefix``, to read only.

        A store on this machine's disk gives its own folder and copies nothing; any other is downloaded into
        ``staging``.
        """
        folder = self.run_store.objects.local_path(_path(version, prefix))
        if folder is None:
            self.download(version, staging, prefix)
            return Path(staging)

        def verify(entry: FileEntry) -> None:
            path = self.run_store.objects.local_path(_path(version, entry.path))
            if path is not None:
                self._verify(version, entry, path)

        _transferred(verify, self.files(version, prefix))
        return folder

    def _begun(self) -> list[int]:
        """Every version that has a folder, complete or not, ascending."""
        found = (_VERSION_NAME.fullmatch(name) for name in self.run_store.objects.children(_CHECKPOINTS))
        return sorted(int(match[1]) for match in found if match)

    def _is_complete(self, version: int, sizes: dict[str, int]) -> bool:
        try:
            self._complete_body(version, sizes)
        except CorruptShardError:
            return False
        return True

    def _complete_body(self, version: int, sizes: dict[str, int] | None = None) -> dict[str, Any]:
        """``sizes``: bytes of each file by its path below the checkpoint's folder; default: looked up."""
        url = self.url(version)
        body = self.get(version)
        if body is None:
            raise CorruptShardError(f"{url} is incomplete: {MARKER} is missing")
        absent = _absent(_entries(body), self._sizes(version) if sizes is None else sizes)
        if absent:
            raise CorruptShardError(f"{url} is incomplete: {absent}")
        return body

    def _sizes(self, version: int) -> dict[str, int]:
        """Bytes of each file, by its path below the checkpoint's folder."""
        folder = checkpoint_folder(version)
        return {path.removeprefix(f"{folder}/"): size for path, size in self.run_store.objects.sizes(folder).items()}

    def _verify(self, version: int, entry: FileEntry, local: Path) -> None:
        found = sha256_of_file(local)
        if found != entry.sha256:
            url = self.run_store.url_of(_path(version, entry.path))
            raise CorruptShardError(f"{url} is damaged: its sha256 is {found}, recorded was {entry.sha256}")


def digest_of(files: Iterable[FileEntry]) -> str:
    """What tells one exported model from another: names and contents of its files."""
    return sha256_of("".join(f"{entry.path} {entry.sha256}\n" for entry in files).encode())


def _path(version: int, name: str) -> str:
    return f"{checkpoint_folder(version)}/{name}"


def _entries(body: dict[str, Any], prefix: str = "") -> list[FileEntry]:
    entries = [FileEntry(**entry) for entry in body[_FILES]]
    return [entry for entry in entries if not prefix or entry.path.startswith(f"{prefix.rstrip('/')}/")]


def _absent(files: Iterable[FileEntry], sizes: dict[str, int]) -> str:
    """What is missing or of another size, in words; empty if nothing is."""
    return "; ".join(
        f"{entry.path} is missing"
        if entry.path not in sizes
        else f"{entry.path} has {sizes[entry.path]} of {entry.bytes} bytes"
        for entry in files
        if sizes.get(entry.path) != entry.bytes
    )


def _transferred(act: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    return list(in_parallel(act, items, TRANSFERS, ahead=len(items)))
