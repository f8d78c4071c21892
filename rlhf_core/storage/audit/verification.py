"""Is everything that a run names still there, and still what was recorded?

::

    documents ─▶ checksum, place, what they name ─▶ claims ─▶ there? its size? its sha256? ─▶ faults: all of them
                      │                                 images that a shard's rows show ◀──┘
                      └▶ gaps in the chain of iterations, checkpoints that are not what their update made ──┘

Every byte is read once, in parallel and in pieces: memory grows with the number of objects, not with their size. A run that is
being written may be looked at: what its writer deletes meanwhile, with the document that named it, is no fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rlhf_core.errors import CorruptShardError, StorageError
from rlhf_core.records import Stage
from rlhf_core.storage.audit.contents import (
    AHEAD,
    READERS,
    documents,
    holds_trajectories,
    images_of_part,
    is_document_path,
    may_show_images,
    names_in,
)
from rlhf_core.storage.digest import sha256_of
from rlhf_core.storage.parallel import in_parallel
from rlhf_core.storage.paths import manifest_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlhf_core.storage.audit.contents import Document, Named
    from rlhf_core.storage.run_store import RunStore

Kind = Literal["missing", "altered", "foreign", "contradiction", "unreadable"]
Progress = Callable[[int, int], None]  # (bytes that are done, bytes in all)

_UPDATE = re.compile(rf"iterations/(\d{{8,}})/{Stage.UPDATE}\.json")
_WORLD = re.compile(r"worlds/\d{8,}\.json")
_OF_ITERATION = re.compile(r"iterations/(\d{8,})/")
_OF_CHECKPOINT = re.compile(r"checkpoints/v(\d{8,})/")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is not as it was recorded."""

    path: str  # relative to the run's root
    kind: Kind
    problem: str  # in words
    named_by: str  # path of the document that tells; the object's own where it is one


@dataclass(frozen=True, slots=True)
class Verification:
    """What was looked at, and what is wrong."""

    run_id: str
    url: str
    version: int | None  # only what made this version; None: all
    documents: int
    objects: int  # besides the documents: shards, images, files of checkpoints
    bytes: int
    unnamed: int  # objects that no document names: no fault (``garbage``)
    faults: tuple[Fault, ...]

    @property
    def ok(self) -> bool:
        """True if nothing is wrong."""
        return not self.faults


@dataclass
class _Findings:
    """What the documents say."""

    claims: dict[str, list[Named]] = field(default_factory=dict)  # by path
    digests: dict[str, str] = field(default_factory=dict)  # document -> sha256 of its bytes
    weights: dict[int, dict[str, str]] = field(default_factory=dict)  # version -> digests, by the update that made it
    saved: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)  # checkpoint -> version, digests
    moved: set[int] = field(default_factory=set)  # versions that were made again by other processes, and then saved
    run: dict[str, Any] | None = None  # the body of run.json
    faults: list[Fault] = field(default_factory=list)


def verify(store: RunStore, version: int | None = None, progress: Progress | None = None) -> Verification:
    """Read everything that the run names, and compare.

    Args:
        store: of the run.
        version: only what made this version: the iterations before it, and its checkpoint.
        progress: is told how far it has come.

    Raises:
        StorageError: the store does not answer. What is wrong with single objects is a result, not an error.
    """
    listed = store.objects.sizes()
    sizes = {path: size for path, size in listed.items() if _concerns(path, version)}
    found = _Findings()
    for document in documents(store, sizes):
        _take(found, store, document)
    found.faults += _gaps(found, sizes, version)
    if may_show_images(listed, found.run):
        _take_images(found, store, listed)
    shards = {path: claims for path, claims in found.claims.items() if path not in found.digests}
    total = sum(listed.get(path, 0) for path in shards)
    done = 0

    def compare(path: str) -> tuple[str, list[Fault]]:
        return path, list(_compared(store, shards[path]))

    for path, faults in in_parallel(compare, sorted(shards), READERS, AHEAD):
        found.faults += faults
        done += listed.get(path, 0)
        if progress is not None:
            progress(done, total)
    for path in found.digests:
        found.faults += _document_faults(found, path)
    return Verification(
        run_id=store.run_id,
        url=store.url,
        version=version,
        documents=len(found.digests),
        objects=sum(not is_document_path(path) for path in shards),
        bytes=total + sum(listed.get(path, 0) for path in found.digests),
        unnamed=sum(path not in found.claims and path not in found.digests for path in sizes),
        faults=tuple(sorted(_lasting(store, found.faults), key=lambda fault: (fault.path, fault.kind))),
    )


def _concerns(path: str, version: int | None) -> bool:
    """True if the object has to do with ``version``, or no version is asked for."""
    if version is None or path == "run.json" or _WORLD.fullmatch(path):
        return True
    iteration, checkpoint = _OF_ITERATION.match(path), _OF_CHECKPOINT.match(path)
    if iteration is not None:
        return int(iteration[1]) < version
    return checkpoint is not None and int(checkpoint[1]) == version


def _take(found: _Findings, store: RunStore, document: Document) -> None:
    path, body = document.path, document.body
    if document.is_foreign:
        return
    found.digests[path] = sha256_of(document.data)
    if body is None:
        kind: Kind = "altered" if isinstance(document.fault, CorruptShardError) else "unreadable"
        found.faults.append(Fault(path, kind, str(document.fault), path))
        return
    if path == "run.json":
        found.run = body
    try:
        for named in names_in(path, body):
            found.claims.setdefault(named.path, []).append(named)
        wrong = _misplaced(store, path, body)
        _note_weights(found, path, body)
    except (CorruptShardError, AttributeError, KeyError, TypeError, ValueError) as error:
        found.faults.append(Fault(path, "altered", f"it is not what its place says: {error}", path))
        return
    if wrong is not None:
        found.faults.append(Fault(path, "foreign", wrong, path))


def _take_images(found: _Findings, store: RunStore, listed: dict[str, int]) -> None:
    """What the rows of the shards show; a shard that is damaged is told of when its bytes are compared."""

    def images(path: str) -> list[Named]:
        try:
            return images_of_part(store, path)
        except StorageError:
            return []

    shards = sorted(path for path in found.claims if path in listed and holds_trajectories(path))
    for named in in_parallel(images, shards, READERS, AHEAD):
        for image in named:
            found.claims.setdefault(image.path, []).append(image)


def _misplaced(store: RunStore, path: str, body: dict[str, Any]) -> str | None:
    """What of the document belongs elsewhere, in words; None: nothing."""
    folder, _, name = path.rpartition("/")
    place = re.fullmatch(r"iterations/(\d{8,})(/rounds)?|(checkpoints)/v(\d{8,})|(eval)", folder)
    expected: dict[str, Any] = {}
    if path == "run.json":
        expected = {"run_id": store.run_id}
    elif place and place[1] and place[2]:
        expected = {"iteration": int(place[1]), "number": int(name.removesuffix(".json"))}
    elif place and place[1] and name.removesuffix(".json") in set(Stage):
        expected = {"run_id": store.run_id, "iteration": int(place[1]), "stage": name.removesuffix(".json")}
    elif place and place[3]:
        expected = {"version": int(place[4])}
    elif place and place[5] and name.removeprefix("v").removesuffix(".json").isdecimal():
        expected = {"version": int(name.removeprefix("v").removesuffix(".json"))}
    differing = [f"its {key} is {body[key]!r}" for key in expected if body.get(key, expected[key]) != expected[key]]
    return f"it does not belong there: {', '.join(differing)}" if differing else None


def _note_weights(found: _Findings, path: str, body: dict[str, Any]) -> None:
    update, checkpoint = _UPDATE.fullmatch(path), _OF_CHECKPOINT.match(path)
    if _WORLD.fullmatch(path):
        found.moved.add(int(body["since"]))
    elif update is not None:
        found.weights[int(update[1]) + 1] = _weight_digests(body["body"])
    elif checkpoint is not None:
        found.saved[path] = (int(checkpoint[1]), _weight_digests(body))


def _weight_digests(body: dict[str, Any]) -> dict[str, str]:
    """``digest``, ``critic_digest`` …, of the weights of each model that learns."""
    return {name: value for name, value in body.items() if name.endswith("digest")}


def _gaps(found: _Findings, sizes: dict[str, int], version: int | None) -> Iterator[Fault]:
    """What nothing names and yet must be there, and what two documents say differently."""
    if "run.json" not in sizes:
        yield Fault("run.json", "missing", "it is missing: nothing tells what the run did", "run.json")
    newest = max(found.weights, default=0) if version is None else version
    for iteration in range(newest):
        path = manifest_path(iteration, Stage.UPDATE)
        if path not in sizes:
            after = f"it is missing, although version {newest} was made"
            yield Fault(path, "missing", after, manifest_path(newest - 1, Stage.UPDATE))
    for path, (saved, digests) in found.saved.items():
        made = {} if saved in found.moved else found.weights.get(saved, {})
        for name in sorted(digests.keys() & made.keys()):
            if digests[name] != made[name]:
                told = manifest_path(saved - 1, Stage.UPDATE)
                problem = f"its {name} is {digests[name]}, the update that made the version says {made[name]}"
                yield Fault(path, "contradiction", problem, told)


def _compared(store: RunStore, claims: list[Named]) -> Iterator[Fault]:
    """The faults of one object that is no document."""
    path = claims[0].path
    try:
        size, sha256 = store.objects.hashed(path)
    except FileNotFoundError:
        yield from (Fault(path, "missing", "it is missing", claim.named_by) for claim in _distinct(claims))
        return
    except StorageError as error:
        yield Fault(path, "unreadable", str(error), claims[0].named_by)
        return
    for claim in _distinct(claims):
        problem = _difference(claim, size, sha256)
        if problem is not None:
            yield Fault(path, "altered", problem, claim.named_by)


def _document_faults(found: _Findings, path: str) -> Iterator[Fault]:
    """A document is named by the sha256 of its bytes where it is the input of a stage."""
    for claim in _distinct(found.claims.get(path, [])):
        problem = _difference(claim, claim.bytes, found.digests[path])
        if problem is not None:
            yield Fault(path, "altered", problem, claim.named_by)


def _difference(claim: Named, size: int | None, sha256: str) -> str | None:
    if claim.bytes is not None and claim.bytes != size:
        return f"it has {size} bytes, recorded were {claim.bytes}"
    if claim.sha256 is not None and claim.sha256 != sha256:
        return f"its sha256 is {sha256}, recorded was {claim.sha256}"
    return None


def _distinct(claims: list[Named]) -> list[Named]:
    """One of each that says the same: a part stands in its round and in the manifest."""
    return list({(claim.sha256, claim.bytes): claim for claim in reversed(claims)}.values())


def _lasting(store: RunStore, faults: list[Fault]) -> Iterator[Fault]:
    """Those whose document is still there: a rotation deletes a checkpoint's document first, and then its files."""
    there: dict[str, bool] = {}
    for fault in faults:
        if fault.kind == "missing" and fault.path != fault.named_by:
            if fault.named_by not in there:
                there[fault.named_by] = store.objects.exists(fault.named_by)
            if not there[fault.named_by]:
                continue
        yield fault
