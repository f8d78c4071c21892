"""Objects on a remote file system, through fsspec, with a limit on every act.

fsspec's own waits are not limits: a PUT to a stalled S3 server waits for ever whatever its read time-out. So each act
gets a deadline, several attempts below it, and a pause with jitter between them::

    act ─▶ attempt (≤ a third of ``timeout``) ─▶ transient error? ─▶ pause ─▶ attempt … ─▶ done | StorageError

The limit is ``timeout``; it and the attempt's share of it grow by the time the bytes take at ``SLOWEST_BYTES_PER_SECOND``.

An open remote stream is never handed to a writer: closing it after an error publishes a truncated object. An object is
sent whole instead, from bytes or from a finished local file.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import fsspec
from fsspec.asyn import AsyncFileSystem

from rlhf_core.errors import StorageError
from rlhf_core.storage.backends.remote_errors import (
    is_expired,
    is_missing_bucket,
    is_permanent,
    is_precondition_failed,
    reason,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime
    from pathlib import Path

SLOWEST_BYTES_PER_SECOND = 4 * 2**20  # slower than this counts as stalled
LARGEST_CREATE = 64 * 2**20  # above it s3fs sends several parts, and then two creators can both win
DOWNLOAD_CHUNK = 32 * 2**20
ATTEMPTS_IN_LIMIT = 3  # so a lost answer leaves time for another try
LONGEST_PAUSE = 5.0
FIRST_PAUSE = 0.1

_CREATE_LOCK = threading.Lock()  # memory:// checks and writes in two steps
_JITTER = random.Random()  # never the global generator: that one belongs to the run's seed


class RemoteBackend:
    """The acts of an object store on any fsspec file system."""

    def __init__(self, root: str, options: dict[str, Any], timeout: float) -> None:
        self._root = root
        self._timeout = timeout
        self._fs = fsspec.filesystem(root.split("://", 1)[0], **options)
        self._base = self._fs._strip_protocol(root).rstrip("/")

    def read(self, name: str) -> bytes:
        """The whole object."""
        volume = self.size(name)
        return bytes(self._act("read", name, self._fs.cat_file, self._full(name), volume=volume))

    def size(self, name: str) -> int:
        """Bytes of the object."""
        self._fs.invalidate_cache()
        info = self._act("size", name, self._fs.info, self._full(name))
        if info["type"] != "file":
            raise FileNotFoundError(name)
        return int(info["size"])

    def sizes(self, prefix: str) -> dict[str, int]:
        """Every object below ``prefix`` and its bytes."""
        self._fs.invalidate_cache()
        try:
            found = self._act("list", prefix, self._fs.find, self._full(prefix), detail=True)
        except FileNotFoundError:
            return {}
        return {self._relative(path): int(info["size"]) for path, info in found.items() if info["type"] == "file"}

    def children(self, prefix: str) -> list[str]:
        """Names of the folders and objects directly below ``prefix``."""
        self._fs.invalidate_cache()
        try:
            found = self._act("list", prefix, self._fs.ls, self._full(prefix), detail=False)
        except FileNotFoundError:
            return []
        return [path.rstrip("/").rsplit("/", 1)[-1] for path in found]

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Replace the object by one atomic act."""
        self._act("put", name, self._fs.pipe_file, self._full(name), bytes(data), volume=len(data))

    def create(self, name: str, data: bytes) -> None:
        """Create the object by one conditional PUT; ``FileExistsError`` if it exists."""
        if len(data) > LARGEST_CREATE:
            raise StorageError(
                f"put_once {self._url(name)}: {len(data)} bytes are more than one conditional PUT carries "
                f"({LARGEST_CREATE}); put the data under a name of its own and create a small manifest of it"
            )
        self._act("put_once", name, self._create, name, data, volume=len(data))

    def put_file(self, local: Path, name: str, *, link: bool) -> None:
        """Replace the object by the contents of ``local``."""
        del link  # nothing is shared with another machine
        volume = local.stat().st_size
        self._act("put_file", name, self._fs.put_file, str(local), self._full(name), volume=volume)

    def get_file(self, name: str, local: Path, *, link: bool) -> None:
        """Copy the object to ``local``, one ranged read at a time."""
        del link  # nothing is shared with another machine
        with local.open("wb") as file:
            for piece in self.pieces(name):
                file.write(piece)

    def pieces(self, name: str) -> Iterator[bytes]:
        """The object, a piece at a time."""
        size = self.size(name)
        for start in range(0, size, DOWNLOAD_CHUNK):
            end = min(start + DOWNLOAD_CHUNK, size)
            yield self._act("read", name, self._fs.cat_file, self._full(name), start=start, end=end, volume=end - start)

    def delete(self, name: str) -> None:
        """Remove the object."""
        with suppress(FileNotFoundError):
            self._act("delete", name, self._fs.rm_file, self._full(name))

    def remove_folder(self, name: str) -> None:
        """Remove the folder and all that is left in it."""
        with suppress(FileNotFoundError):
            self._act("remove_folder", name, self._fs.rm, self._full(name), recursive=True)

    def modified(self, name: str) -> float:
        """Unix seconds of the object's last change."""
        changed: datetime = self._act("modified", name, self._fs.modified, self._full(name))
        return changed.timestamp()

    def half_written(self) -> dict[str, tuple[int, float]]:
        """What writers left that died: nothing is known of it on a file system of whatever kind."""
        return {}

    def discard(self, name: str) -> None:
        """Remove what ``half_written`` named."""
        raise FileNotFoundError(name)

    def _create(self, name: str, data: bytes, **limits: Any) -> None:
        with _CREATE_LOCK:
            self._fs.pipe_file(self._full(name), data, mode="create", **limits)

    def _act(self, act: str, name: str, call: Callable[..., Any], *args: Any, volume: int = 0, **kwargs: Any) -> Any:
        """Do ``call`` within the limit for ``volume`` bytes."""
        sending = volume / SLOWEST_BYTES_PER_SECOND
        limit = self._timeout + sending
        deadline = time.monotonic() + limit
        renewed = False
        telling: Exception | None = None
        for attempt in itertools.count(1):
            allowed = min(self._timeout / ATTEMPTS_IN_LIMIT + sending, deadline - time.monotonic())
            try:
                return self._attempt(call, max(0.05, allowed), *args, **kwargs)
            except Exception as error:
                if is_precondition_failed(error):
                    raise FileExistsError(name) from error
                if is_missing_bucket(error):
                    raise StorageError(f"{act} {self._url(name)} failed: {self._no_bucket()}") from error
                if isinstance(error, FileNotFoundError):
                    raise
                if telling is None or not isinstance(error, TimeoutError):
                    telling = error
                pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt) * _JITTER.uniform(0.5, 1.0)
                out_of_time = time.monotonic() + pause >= deadline
                renew = is_expired(error) and not renewed
                if out_of_time or (is_permanent(error) and not renew):
                    within = f" within {limit:.1f} s ({attempt} attempts)" if out_of_time else ""
                    why = reason(telling, self._place())
                    raise StorageError(f"{act} {self._url(name)} failed{within}: {why}") from telling
                if renew:
                    renewed = True
                    self._renew_credentials()
                time.sleep(pause)
        raise AssertionError("unreachable")

    def _attempt(self, call: Callable[..., Any], seconds: float, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._fs, AsyncFileSystem):
            return call(*args, timeout=seconds, **kwargs)
        return _in_thread(call, seconds, *args, **kwargs)

    def _renew_credentials(self) -> None:
        """Ask for credentials again where they came from."""

    def _place(self) -> str:
        """The server, in words."""
        return self._root

    def _no_bucket(self) -> str:
        return f"{self._root} does not exist"

    def _full(self, name: str) -> str:
        return f"{self._base}/{name}" if name else self._base

    def _relative(self, full: str) -> str:
        return full[len(self._base) :].lstrip("/")

    def _url(self, name: str) -> str:
        return f"{self._root}/{name}"


def _in_thread(call: Callable[..., Any], seconds: float, *args: Any, **kwargs: Any) -> Any:
    """Call a blocking file system; give up on it, not on the process, after ``seconds``."""
    outcome: list[Any] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            outcome.append(call(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised in the caller's thread
            failure.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:.1f} s")
    return outcome[0]
