"""What of a run no document names and nobody will ever use, and how it is removed.

::

    parts of a stage, or of an evaluation, that is complete      an attempt died, and another made other rows
    files of a checkpoint without checkpoint.json                older than the newest complete one
    images that no row of a shard shows                          an hour old: a rollout died before it published them
    what a writer that died left half written; probes            an hour old

Everything else stays. What no document names and none of these rules knows may be somebody's, or of another version of this
software: it is told of and never touched. Where a document cannot be read, what it names is not known, and nothing is removed.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from rlhf_core.errors import StorageError
from rlhf_core.records import Stage
from rlhf_core.storage.audit.contents import (
    AHEAD,
    READERS,
    documents,
    holds_trajectories,
    images_of_part,
    is_document_path,
    names_in,
)
from rlhf_core.storage.checkpoints import MARKER, CheckpointStore
from rlhf_core.storage.images import IMAGE
from rlhf_core.storage.lease import acquire
from rlhf_core.storage.lease_owner import LeaseOwner
from rlhf_core.storage.parallel import in_parallel
from rlhf_core.storage.paths import PART_NAME, checkpoint_folder, manifest_path

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from rlhf_core.storage.lease import Lease
    from rlhf_core.storage.run_store import RunStore

Rule = Literal["part", "checkpoint", "image", "half written", "probe"]

HOUR = 3600.0  # a writer that has changed nothing for so long is dead
LEASE_SECONDS = 120.0
BATCH = 256  # objects between two looks at the lease

_PART = re.sub(r"\?P<\w+>", "?:", PART_NAME.pattern)
_MENTION = re.compile(_PART.encode())
_STAGE_PART = re.compile(rf"iterations/(\d{{8,}})/({'|'.join(Stage)})/{_PART}")
_EVALUATION_PART = re.compile(rf"eval/(v\d{{8,}})/{_PART}")
_CHECKPOINT_FILE = re.compile(r"checkpoints/v(\d{8,})/.+")
_PROBE = re.compile(r"\.probe/[0-9a-f]{32}")


class Piece(NamedTuple):
    """One object that may go."""

    path: str  # relative to the run's root
    bytes: int
    rule: Rule
    reason: str  # in words


@dataclass(frozen=True, slots=True)
class Garbage:
    """What a run holds besides what is named."""

    pieces: tuple[Piece, ...]  # may go
    waiting: dict[str, int]  # path -> bytes: of stages that are not complete; the next attempt uses them
    unknown: dict[str, int]  # path -> bytes: named by nothing, known to no rule; never removed
    doubts: tuple[str, ...]  # why nothing may be removed

    @property
    def bytes(self) -> int:
        """Of all that may go."""
        return sum(piece.bytes for piece in self.pieces)


@dataclass
class _Known:
    """What the documents say."""

    documents: set[str] = field(default_factory=set)
    named: set[str] = field(default_factory=set)  # paths
    mentioned: set[bytes] = field(default_factory=set)  # names of parts that occur anywhere in a JSON file
    doubts: list[str] = field(default_factory=list)


def find_garbage(store: RunStore, older_than: float = HOUR) -> Garbage:
    """Look, and change nothing.

    Args:
        store: of the run.
        older_than: seconds since the last change, of what may still be being written.
    """
    # Half-written objects first: what appears afterwards under its own name is then not taken for another thing.
    half_written = store.objects.half_written(older_than)
    sizes = store.objects.sizes()
    known = _read(store, sizes)
    newest = CheckpointStore(store).newest()
    pieces, waiting, unknown = [], {}, {}
    for path, size in sorted(sizes.items()):
        if path in known.named or path in known.documents or path.rpartition("/")[2].encode() in known.mentioned:
            continue
        found = _ruled(store, path, size, known.documents, None if newest is None else newest[0], older_than)
        if isinstance(found, Piece):
            pieces.append(found)
        elif found:
            waiting[path] = size
        else:
            unknown[path] = size
    dead = [Piece(path, size, "half written", "its writer died") for path, size in sorted(half_written.items())]
    return Garbage((*pieces, *dead), waiting, unknown, tuple(known.doubts))


def remove_garbage(store: RunStore, progress: Callable[[int, int], None] | None = None) -> Garbage:
    """Find the garbage and remove it, as the run's only writer. Returns what was removed.

    Args:
        store: of the run.
        progress: is told (objects removed, objects in all).

    Raises:
        LeaseError: somebody works on the run, or took it over meanwhile; the message names the owner.
        StorageError: a document of the run cannot be read: what it names is not known, and nothing is removed.
    """
    lease = acquire(store, LeaseOwner.of_this_process(), LEASE_SECONDS)
    try:
        garbage = find_garbage(store)
        if garbage.doubts:
            raise StorageError(f"nothing of {store.url} is removed: {'; '.join(garbage.doubts)}")
        _remove(store, lease, garbage, progress)
    finally:
        lease.release()
    return garbage


def _read(store: RunStore, paths: Collection[str]) -> _Known:
    known = _Known(documents={path for path in paths if is_document_path(path)})
    vanished = {path for path in known.documents if not path.startswith("lease/")}  # which its owner clears away
    for document in documents(store, known.documents):
        vanished.discard(document.path)
        known.mentioned.update(_MENTION.findall(document.data))
        if document.body is not None:
            try:
                known.named.update(named.path for named in names_in(document.path, document.body))
            except StorageError as error:
                known.doubts.append(str(error))
        elif not document.is_foreign:
            known.doubts.append(str(document.fault))
    _read_images(known, store, paths)
    known.doubts += [f"{store.url_of(path)} vanished while it was looked at" for path in sorted(vanished)]
    if "run.json" not in known.documents:
        known.doubts.append("it has no run.json: it is no run, or a damaged one")
    return known


def _read_images(known: _Known, store: RunStore, paths: Collection[str]) -> None:
    """Whatever a shard shows is kept, also where the shard itself may go: its images then go the next time."""

    def images(path: str) -> set[str] | str:
        try:
            return {named.path for named in images_of_part(store, path)}
        except StorageError as error:
            return f"the images that it shows are not known: {error}"

    if not any(IMAGE.fullmatch(path) for path in paths):
        return
    for found in in_parallel(images, sorted(filter(holds_trajectories, paths)), READERS, AHEAD):
        if isinstance(found, str):
            known.doubts.append(found)
        else:
            known.named |= found


def _ruled(
    store: RunStore, path: str, size: int, present: Collection[str], newest: int | None, older_than: float
) -> Piece | bool:
    """Garbage; or else True if it waits for somebody, False if no rule knows it."""
    if part := _STAGE_PART.fullmatch(path):
        iteration = int(part[1])
        # The update as well: until then an attempt may still be at work on the iteration.
        if manifest_path(iteration, Stage(part[2])) in present and manifest_path(iteration, Stage.UPDATE) in present:
            return Piece(path, size, "part", f"stage {part[2]} of iteration {iteration} is complete without it")
        return True
    if evaluated := _EVALUATION_PART.fullmatch(path):
        if f"eval/{evaluated[1]}.json" in present:
            return Piece(path, size, "part", f"the evaluation of {evaluated[1]} is recorded without it")
        return True
    if saved := _CHECKPOINT_FILE.fullmatch(path):
        version = int(saved[1])
        if f"{checkpoint_folder(version)}/{MARKER}" in present:
            return False  # somebody added it to a complete checkpoint
        if newest is not None and version < newest:
            return Piece(path, size, "checkpoint", f"checkpoint {version} was never completed, {newest} is")
        return True
    if _PROBE.fullmatch(path):
        piece = Piece(path, size, "probe", "left by a start that was cut off")
        return piece if _is_older(store, path, older_than) else True
    if IMAGE.fullmatch(path):
        piece = Piece(path, size, "image", "no trajectory shows it")
        return piece if _is_older(store, path, older_than) else True
    return False


def _is_older(store: RunStore, path: str, seconds: float) -> bool:
    """False too if it is gone."""
    try:
        return time.time() - store.objects.modified(path) > seconds
    except FileNotFoundError:
        return False


def _remove(store: RunStore, lease: Lease, garbage: Garbage, progress: Callable[[int, int], None] | None) -> None:
    def remove(piece: Piece) -> None:
        (store.objects.discard if piece.rule == "half written" else store.objects.delete)(piece.path)

    pieces = garbage.pieces
    for start in range(0, len(pieces), BATCH):
        if lease.expires_at - time.time() < LEASE_SECONDS / 2:
            lease.renew()
        batch = pieces[start : start + BATCH]
        for _ in in_parallel(remove, batch, READERS):
            pass
        if progress is not None:
            progress(start + len(batch), len(pieces))
    for version in sorted({int(found[1]) for piece in pieces if (found := _CHECKPOINT_FILE.fullmatch(piece.path))}):
        if not store.objects.sizes(checkpoint_folder(version)):
            store.objects.remove_folder(checkpoint_folder(version))
