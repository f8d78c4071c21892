"""Everything that the documents of a run name: the one enumeration behind ``rlhf lineage verify`` and ``rlhf gc``.

::

    every .json of the run ─▶ a document? ─▶ itself, and what it names ─▶ Named(path, sha256, bytes, named_by)
       run.json                               nothing
       iterations/…/update.json               its parts; the manifests it was made from, by their sha256; its rounds
       iterations/…/rounds/00.json, eval/…    their parts
       checkpoints/…/checkpoint.json          its files; the update that made its version
       latest.json, best.json, finished.json  a checkpoint, an update
       worlds/…, attempts/…, iterations/…/sync.json   nothing
    a shard of trajectories ─▶ the images that its rows show         ``images_of_part``

**To add a kind of document** nothing is needed here as long as it lies in the run's folder, ends in ``.json``, is written by
``encode_document`` and names its objects as ``Part`` does: a mapping with ``path`` (relative to the run's root), ``sha256`` and
``bytes``, anywhere in its body. Then it and they are verified, and never taken for garbage. A document that names things in
another way gets a line in ``_NAMES_BY_PATH``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.errors import CorruptShardError, StorageError
from rlhf_core.records import Stage
from rlhf_core.storage.checkpoints import MARKER
from rlhf_core.storage.digest import sha256_of
from rlhf_core.storage.documents import decode_document
from rlhf_core.storage.images import FOLDER, IMAGE, images_in
from rlhf_core.storage.parallel import in_parallel
from rlhf_core.storage.paths import MANIFEST, PART_NAME, ROUND, checkpoint_folder, manifest_path, round_path
from rlhf_core.storage.shards import schema
from rlhf_core.storage.shards.tables import decode_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rlhf_core.storage.run_store import RunStore

READERS = 8  # objects under way at once
AHEAD = 4 * READERS  # results that may wait for whoever asks for them: what bounds the memory

_TRAJECTORIES = re.compile(rf"(iterations/\d{{8,}}/{Stage.ROLLOUT}|eval/v\d{{8,}})/[^/]+\.arrow")
_IN_CHECKPOINT = re.compile(r"checkpoints/[^/]+/.+")
_CHECKPOINT = re.compile(rf"checkpoints/v\d{{8,}}/{re.escape(MARKER)}")
_POINTER = re.compile(r"(latest|best)\.json")
_END = re.compile(r"finished\.json")

# What a run itself writes. One of these that is damaged is a fault; so is another that has a checksum as they have. Any other
# file that ends in .json may be anybody's.
_OTHER = re.compile(
    r"run\.json|eval/v\d{8,}\.json|(lease|worlds)/\d{8,}\.json|attempts/\d{8,}(-end)?\.json|iterations/\d{8,}/sync\.json"
)
_OF_A_RUN = (_OTHER, MANIFEST, ROUND, _CHECKPOINT, _POINTER, _END)


class Named(NamedTuple):
    """An object that a run must have."""

    path: str  # relative to the run's root
    sha256: str | None  # None: not said. A document holds its own checksum
    bytes: int | None  # None: not said
    named_by: str  # path of the document that names it; of a document, by its place: itself


@dataclass(frozen=True, slots=True)
class Document:
    """A document as it was read."""

    path: str
    data: bytes  # empty if it could not be read
    body: dict[str, Any] | None  # None: there is a fault
    fault: Exception | None = None

    @property
    def is_foreign(self) -> bool:
        """True if it is a JSON file that no run writes: somebody else's, or of other software."""
        known = (pattern.fullmatch(self.path) for pattern in _OF_A_RUN)
        return self.body is None and not any(known) and b'"checksum":"' not in self.data


def named_objects(store: RunStore) -> Iterator[Named]:
    """Every document of the run, and what each names; an object that several name comes several times.

    Damaged documents name nothing: who needs to know of them asks ``documents``.
    """
    for document in documents(store):
        if document.body is not None:
            yield Named(document.path, None, len(document.data), document.path)
            yield from names_in(document.path, document.body)


def documents(store: RunStore, paths: Iterable[str] | None = None) -> Iterator[Document]:
    """The documents of the run, read in parallel, a few ahead of whoever asks; one that vanishes meanwhile is left out.

    Args:
        store: of the run.
        paths: which; default: all.
    """
    wanted = [path for path in (store.objects.list() if paths is None else paths) if is_document_path(path)]
    for read in in_parallel(lambda path: _read(store, path), wanted, READERS, AHEAD):
        if read is not None:
            yield read


def is_document_path(path: str) -> bool:
    """True for every ``.json`` but the files within a checkpoint, which are of other kinds."""
    return path.endswith(".json") and (_IN_CHECKPOINT.fullmatch(path) is None or is_checkpoint_document(path))


def is_checkpoint_document(path: str) -> bool:
    """True for the checkpoint.json of a version."""
    return _CHECKPOINT.fullmatch(path) is not None


def names_in(path: str, body: dict[str, Any]) -> list[Named]:
    """What the document at ``path`` names; ``CorruptShardError`` if it is not what its place says."""
    found = [] if is_checkpoint_document(path) else list(_parts_in(path, body))
    try:
        for pattern, names in _NAMES_BY_PATH:
            if pattern.fullmatch(path):
                found += names(path, body)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptShardError(f"{path} is not what its place says: {error!r}") from error
    return found


def holds_trajectories(path: str) -> bool:
    """True for the path of a shard whose rows may show images."""
    return _TRAJECTORIES.fullmatch(path) is not None and PART_NAME.fullmatch(path.rpartition("/")[2]) is not None


def images_of_part(store: RunStore, path: str) -> list[Named]:
    """The images that the rows of a shard of trajectories show; none where it vanished meanwhile.

    Raises:
        CorruptShardError: it is damaged.
        StorageError: it cannot be read.
    """
    try:
        data = store.objects.view(path)
    except FileNotFoundError:
        return []
    claim = PART_NAME.fullmatch(path.rpartition("/")[2])
    if claim is None or claim["sha256"] != sha256_of(data):
        raise CorruptShardError(f"{store.url_of(path)} is damaged: its sha256 is not the one in its name")
    try:
        shown = images_in(decode_table(data, schema.TRAJECTORY, ["images"]))
    except CorruptShardError as error:
        raise CorruptShardError(f"{store.url_of(path)}: {error}") from error
    return [Named(image, _sha256_in(image), None, path) for image in shown]


def may_show_images(paths: Iterable[str], run: dict[str, Any] | None) -> bool:
    """True if the shards of a run must be asked for images: by its configuration it may see them, or there are some.

    Args:
        paths: of its objects.
        run: the body of run.json.
    """
    data = ((run or {}).get("config") or {}).get("data") or {}
    return bool(data.get("max_images_per_prompt")) or any(path.startswith(f"{FOLDER}/") for path in paths)


def _sha256_in(image: str) -> str:
    claim = IMAGE.fullmatch(image)
    return claim["sha256"] if claim else "none: this is not the path of an image"


def _read(store: RunStore, path: str) -> Document | None:
    try:
        data = store.objects.read(path)
    except FileNotFoundError:
        return None
    except StorageError as error:
        return Document(path, b"", None, error)
    try:
        return Document(path, data, decode_document(data, store.url_of(path)))
    except StorageError as error:
        return Document(path, data, None, error)


def _parts_in(path: str, value: Any) -> Iterator[Named]:
    """Every mapping in ``value`` that says of an object what ``Part`` says."""
    if isinstance(value, dict):
        if _is_part(value):
            yield Named(value["path"], value["sha256"], value["bytes"], path)
            return
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _parts_in(path, inner)


def _is_part(value: dict[str, Any]) -> bool:
    kinds = (("path", str), ("sha256", str), ("bytes", int))
    return all(isinstance(value.get(name), kind) for name, kind in kinds)


def _of_stage(path: str, body: dict[str, Any]) -> Iterator[Named]:
    """The manifests of the same iteration that a stage was made from; the rounds that hold its groups, used or left."""
    folder = path.rpartition("/")[0]
    for stage, sha256 in body["inputs"].items():
        if stage in set(Stage):
            yield Named(f"{folder}/{stage}.json", sha256, None, path)
    own = body["body"]
    # A batch that was taken over from another run as it was: the rounds are that run's.
    groups = () if "source" in own else (*own.get("selected", ()), *own.get("buffered", ()))
    for iteration, number in sorted({(group["iteration"], group["round"]) for group in groups}):
        yield Named(round_path(iteration, number), None, None, path)


def _of_checkpoint(path: str, body: dict[str, Any]) -> Iterator[Named]:
    folder = path.rpartition("/")[0]
    for entry in body["files"]:
        yield Named(f"{folder}/{entry['path']}", entry["sha256"], entry["bytes"], path)
    yield from _update_before(path, int(folder.rpartition("/v")[2]))


def _of_pointer(path: str, body: dict[str, Any]) -> Iterator[Named]:
    yield Named(f"{checkpoint_folder(body['version'])}/{MARKER}", None, None, path)


def _of_end(path: str, body: dict[str, Any]) -> Iterator[Named]:
    yield from _update_before(path, body["version"])


def _update_before(path: str, version: int) -> Iterator[Named]:
    """The update that made a version."""
    if version > 0:
        yield Named(manifest_path(version - 1, Stage.UPDATE), None, None, path)


_NAMES_BY_PATH: tuple[tuple[re.Pattern[str], Callable[[str, dict[str, Any]], Iterator[Named]]], ...] = (
    (MANIFEST, _of_stage),
    (_CHECKPOINT, _of_checkpoint),
    (_POINTER, _of_pointer),
    (_END, _of_end),
)
