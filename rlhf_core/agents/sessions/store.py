"""The sessions of one engine: open ones by id and by key, and a little memory of closed ones."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from typing import TYPE_CHECKING

from rlhf_core.agents.sessions import refusal
from rlhf_core.agents.sessions.live import LiveSession
from rlhf_core.errors import GenerationError, WorkerError

if TYPE_CHECKING:
    from rlhf_core.records import SessionRecord, SessionRequest

# Whoever asked for a record may not have got it (a lost connection) and ask again; whole records are large.
REMEMBERED_RECORDS = 64
# A late call of a closed session is told so (409) instead of "unknown key"; 100 bytes each.
REMEMBERED_KEYS = 10_000


class SessionStore:
    """Open, find, close. Single-threaded: it lives on one event loop."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[LiveSession, bytes]] = {}  # with the fingerprint of its key
        self._by_key: dict[bytes, LiveSession] = {}
        self._records: OrderedDict[str, SessionRecord] = OrderedDict()
        self._closed_keys: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request: SessionRequest) -> tuple[LiveSession, str]:
        """A new session and its key, which is kept nowhere else.

        Raises:
            GenerationError: a session of this id is open.
        """
        if request.session_id in self._open:
            raise GenerationError(f"session {request.session_id!r} is open already: close it, or use another id")
        self._records.pop(request.session_id, None)
        key = secrets.token_urlsafe(32)
        session = LiveSession(request)
        self._open[request.session_id] = (session, _fingerprint(key))
        self._by_key[_fingerprint(key)] = session
        return session, key

    def find(self, key: str, session_id: str | None = None) -> LiveSession:
        """The session of a key; ``session_id``, where the client sends one, must be its id.

        Raises:
            CallRefusedError: there is none (401), or it is closed (409).
        """
        fingerprint = _fingerprint(key)
        session = self._by_key.get(fingerprint)
        known_id = session.request.session_id if session is not None else self._closed_keys.get(fingerprint)
        if known_id is None or session_id not in (None, known_id):
            raise refusal.unknown_key()
        if session is None or session.closed:
            raise refusal.session_closed(known_id)
        return session

    def get(self, session_id: str) -> LiveSession | None:
        """An open session."""
        return self._open[session_id][0] if session_id in self._open else None

    def open_ids(self) -> list[str]:
        """Ids of the open sessions."""
        return list(self._open)

    def close(self, session_id: str) -> SessionRecord:
        """Forget the session but for its record; closing twice gives the same record.

        Raises:
            WorkerError: there is no such session: this engine was started after it was opened, or closed it long ago.
        """
        if session_id not in self._open:
            if session_id in self._records:
                return self._records[session_id]
            raise WorkerError(
                f"no session {session_id!r} is open on this engine, nor was one closed lately: the engine has been restarted"
            )
        session, fingerprint = self._open.pop(session_id)
        session.close()
        del self._by_key[fingerprint]
        self._closed_keys[fingerprint] = session_id
        record = session.record()
        self._records[session_id] = record
        _forget_oldest(self._records, REMEMBERED_RECORDS)
        _forget_oldest(self._closed_keys, REMEMBERED_KEYS)
        return record


def _fingerprint(key: str) -> bytes:
    """Looked up instead of the key itself: how long a dictionary takes to compare says nothing about the key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _forget_oldest(memory: OrderedDict[bytes, str] | OrderedDict[str, SessionRecord], keep: int) -> None:
    while len(memory) > keep:
        memory.popitem(last=False)
