"""Who worked on a run, when, and how it ended: what no manifest says, because a manifest tells of what succeeded.

::

    attempts/00000001.json         a process began to work on the run
    attempts/00000001-end.json     and stopped: why, and how often it rebuilt workers. Missing: it is at it, or was killed
    attempts/00000002.json         the next one: a retry, or a resume
    iterations/00000012/sync.json  version 13 is on the engines: since when, and how long that took

Runs that began before this was recorded have none of it. Only who holds the run's lease writes.
"""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import ConflictError
from rlhf_core.redaction import redact
from rlhf_core.storage.documents import decode_document, encode_document
from rlhf_core.storage.paths import iteration_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlhf_core.storage.run_store import RunStore

MAX_MESSAGE = 4000  # characters of an error that are kept

_FOLDER = "attempts"
_BEGUN = re.compile(r"(\d{8,})\.json")
SYNC = re.compile(r"iterations/(?P<iteration>\d{8,})/sync\.json")


@dataclass(frozen=True, slots=True)
class Restart:
    """Workers that died and were rebuilt."""

    at: float  # unix seconds
    why: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """One process's work on a run."""

    number: int  # from 1
    started_at: float  # unix seconds
    host: str
    pid: int
    flow_run_id: str | None
    ended_at: float | None = None  # None: it is at it, or was killed
    error: str | None = None  # the class of the error that ended it; None: it ended well, or has not ended
    message: str | None = None
    restarts: tuple[Restart, ...] = field(default=())


def begin_attempt(store: RunStore, host: str, pid: int, flow_run_id: str | None) -> int:
    """Record that this process works on the run. Returns the number of the attempt."""
    number = len(_numbers(store)) + 1
    body = {"started_at": round(time.time(), 3), "host": host, "pid": pid, "flow_run_id": flow_run_id}
    store.objects.put_once(_path(number), encode_document(body, store.url_of(_path(number))))
    return number


def end_attempt(store: RunStore, number: int, error: BaseException | None, restarts: Sequence[Restart]) -> None:
    """Record how it ended."""
    body = {
        "ended_at": round(time.time(), 3),
        "error": None if error is None else type(error).__name__,
        "message": None if error is None else _text(error),
        "restarts": [asdict(restart) for restart in restarts],
    }
    path = _path(number, "-end")
    store.objects.put_once(path, encode_document(body, store.url_of(path)))


def read_attempts(store: RunStore) -> list[Attempt]:
    """All of the run, in order.

    Raises:
        CorruptShardError: a record of one is damaged.
    """
    return [_attempt(store, number) for number in _numbers(store)]


def record_sync(store: RunStore, version: int, stamp: Mapping[str, float]) -> None:
    """Record when a version reached the engines; that of the first time stays.

    Args:
        store: of the run.
        version: from 1; the first one is what the engines were started with.
        stamp: ``started_at`` and ``seconds``.
    """
    path = sync_path(version - 1)
    try:
        store.objects.put_once(path, encode_document({"version": version, **stamp}, store.url_of(path)))
    except ConflictError:
        return


def sync_path(iteration: int) -> str:
    """Where the sync of what an iteration made is recorded."""
    return f"{iteration_folder(iteration)}/sync.json"


def _text(error: BaseException) -> str:
    return redact(str(error))[:MAX_MESSAGE].encode(errors="replace").decode()  # a lone surrogate is no UTF-8


def _attempt(store: RunStore, number: int) -> Attempt:
    begun = decode_document(store.objects.read(_path(number)), store.url_of(_path(number)))
    end: dict[str, Any] = {}
    path = _path(number, "-end")
    if store.objects.exists(path):
        end = decode_document(store.objects.read(path), store.url_of(path))
        end["restarts"] = tuple(Restart(**restart) for restart in end["restarts"])
    return Attempt(number, **begun, **end)


def _numbers(store: RunStore) -> list[int]:
    return sorted(int(found[1]) for name in store.objects.children(_FOLDER) if (found := _BEGUN.fullmatch(name)))


def _path(number: int, suffix: str = "") -> str:
    return f"{_FOLDER}/{number:08d}{suffix}.json"
