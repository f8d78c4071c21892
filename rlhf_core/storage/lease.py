"""Who may write to a run: one owner at a time, and an end to its claim.

::

    lease/00000006.json   owner A, until 12:00:40
    lease/00000007.json   owner A, until 12:01:00    renewed: the next generation
    lease/00000008.json   owner B, until 12:02:30    A had not renewed by 12:01:00

Every change, a claim, a renewal, a release, a take-over, is the creation of the *next* generation by one conditional
create, and the newest generation counts. So of a late renewal and a take-over, or of two take-overs, exactly one
succeeds, and the other learns it at once. Where a store has no conditional creates (``ObjectStore.probe``) the look
back after the create narrows the race but does not close it.

Expiry is judged by wall clocks: those of the hosts must agree to well within the lease's length.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import ConflictError, LeaseError
from rlhf_core.storage.documents import decode_document, encode_document
from rlhf_core.storage.lease_owner import LeaseOwner

if TYPE_CHECKING:
    from rlhf_core.storage.run_store import RunStore

KEPT_GENERATIONS = 8  # so that a claimant who slept through some renewals does not find an old number free
_FOLDER = "lease"


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """One generation of a run's lease, as it is stored."""

    generation: int
    owner: LeaseOwner
    expires_at: float  # unix seconds
    released: bool

    @property
    def is_free(self) -> bool:
        """True if somebody else may take it over now."""
        return self.released or time.time() >= self.expires_at or self.owner.is_known_dead


@dataclass
class Lease:
    """A held lease. ``renew`` it well before ``expires_at``."""

    run_store: RunStore
    owner: LeaseOwner
    seconds: float
    generation: int
    expires_at: float

    def renew(self) -> None:
        """Hold it for another ``seconds`` from now; ``LeaseError`` naming the new owner if it was taken over."""
        self._advance(released=False)

    def release(self) -> None:
        """Let the next owner in at once; no error if it was taken over already."""
        try:
            self._advance(released=True)
        except LeaseError:
            return

    def _advance(self, *, released: bool) -> None:
        newest = holder(self.run_store)
        if newest is None or newest.owner.uuid != self.owner.uuid:
            raise LeaseError(_lost(self.run_store, newest))
        written = _create_next(self.run_store, newest.generation, self.owner, self.seconds, released=released)
        self.generation, self.expires_at = written.generation, written.expires_at


def acquire(run_store: RunStore, owner: LeaseOwner, seconds: float) -> Lease:
    """Become the one writer of a run.

    A lease that has expired, was released, or whose owner is a dead process of this machine is taken over at once.

    Raises:
        LeaseError: another owner holds it. The message names it and the time its lease expires.
    """
    newest = holder(run_store)
    if newest is not None and newest.owner.uuid != owner.uuid and not newest.is_free:
        raise LeaseError(_refusal(run_store, newest))
    written = _create_next(run_store, newest.generation if newest else 0, owner, seconds, released=False)
    return Lease(run_store, owner, seconds, written.generation, written.expires_at)


def holder(run_store: RunStore) -> LeaseRecord | None:
    """The newest generation of the run's lease; None if it was never held."""
    while True:
        generations = _generations(run_store)
        if not generations:
            return None
        try:
            return _read(run_store, generations[-1])
        except FileNotFoundError:  # its owner went on by more than KEPT_GENERATIONS meanwhile
            continue


def _create_next(
    run_store: RunStore, generation: int, owner: LeaseOwner, seconds: float, *, released: bool
) -> LeaseRecord:
    """Create the generation after ``generation``; ``LeaseError`` if another owner was first."""
    record = LeaseRecord(generation + 1, owner, time.time() + seconds, released)
    path = _path(record.generation)
    try:
        run_store.objects.put_once(path, encode_document(asdict(record), run_store.url_of(path)))
    except ConflictError as error:
        raise LeaseError(_lost(run_store, holder(run_store))) from error
    newest = holder(run_store)
    if newest != record:
        raise LeaseError(_lost(run_store, newest))
    for old in _generations(run_store)[:-KEPT_GENERATIONS]:
        run_store.objects.delete(_path(old))
    return record


def _read(run_store: RunStore, generation: int) -> LeaseRecord:
    path = _path(generation)
    body: dict[str, Any] = decode_document(run_store.objects.read(path), run_store.url_of(path))
    return LeaseRecord(**{**body, "owner": LeaseOwner(**body["owner"])})


def _generations(run_store: RunStore) -> list[int]:
    names = run_store.objects.children(_FOLDER)
    return sorted(int(name.removesuffix(".json")) for name in names if name.removesuffix(".json").isdecimal())


def _path(generation: int) -> str:
    return f"{_FOLDER}/{generation:08d}.json"


def _refusal(run_store: RunStore, record: LeaseRecord) -> str:
    return (
        f"run {run_store.run_id!r} is held by {record.owner} until {_time(record.expires_at)}: "
        "stop that process, or wait until its lease has expired"
    )


def _lost(run_store: RunStore, record: LeaseRecord | None) -> str:
    if record is None:
        return f"the lease of run {run_store.run_id!r} is gone: its objects were deleted; stop writing"
    return (
        f"the lease of run {run_store.run_id!r} went to {record.owner} (generation {record.generation}, until "
        f"{_time(record.expires_at)}): stop writing"
    )


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
