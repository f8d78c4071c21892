"""Objects on a remote file system, through fsspec, with a limit on every act.

fsspec's own waits are not limits: a PUT to a stalled S3 server waits for ever whatever its read time-out. So each act
gets a deadline, several attempts below it, and a pause with jitter between them::

    act ─▶ attempt (≤ a third of the limit) ─▶ transient error? ─▶ pause ─▶ attempt … ─▶ done | StorageError

The limit is ``timeout`` plus the time the bytes take at ``SLOWEST_BYTES_PER_SECOND``.

An open remote stream is never handed to a writer: closing it after an error publishes a truncated object. An object is
sent whole instead, from bytes or from a finished local file.
"""

from __future__ import annotations

import errno
import itertools
import random
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import fsspec
from fsspec.asyn import AsyncFileSystem

from rlhf_core.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SLOWEST_BYTES_PER_SECOND = 4 * 2**20  # slower than this counts as stalled
LARGEST_CREATE = 64 * 2**20  # above it s3fs sends several parts, and then two creators can both win
DOWNLOAD_CHUNK = 32 * 2**20
ATTEMPTS_IN_LIMIT = 3  # so a lost answer leaves time for another try
LONGEST_PAUSE = 5.0
FIRST_PAUSE = 0.1

DEFAULT_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {
        "use_listings_cache": False,
        "config_kwargs": {
            "connect_timeout": 3,
            "read_timeout": 10,
            "retries": {"max_attempts": 1, "mode": "standard"},  # retries are ours: botocore's multiply with s3fs's
            "s3": {"addressing_style": "path"},
            "max_pool_connections": 32,
        },
    }
}

_CREATE_LOCK = threading.Lock()  # memory:// checks and writes in two steps
_JITTER = random.Random()  # never the global generator: that one belongs to the run's seed
_PERMANENT = (PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError, TypeError, ValueError)
_PERMANENT_NAMES = {"NoCredentialsError", "PartialCredentialsError", "ParamValidationError", "ProfileNotFound"}
_RETRIED_STATUS = {408, 409, 425, 429}


class RemoteBackend:
    """The acts of an object store on any fsspec file system."""

    def __init__(self, root: str, options: dict[str, Any], timeout: float) -> None:
        self._root = root
        self._timeout = timeout
        protocol = root.split("://", 1)[0]
        self._fs = fsspec.filesystem(protocol, **_merged(DEFAULT_OPTIONS.get(protocol, {}), options))
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

    def put(self, name: str, data: bytes) -> None:
        """Replace the object by one atomic act."""
        self._act("put", name, self._fs.pipe_file, self._full(name), data, volume=len(data))

    def create(self, name: str, data: bytes) -> None:
        """Create the object by one conditional PUT; ``FileExistsError`` if it exists."""
        if len(data) > LARGEST_CREATE:
            raise StorageError(
                f"put_once {self._url(name)}: {len(data)} bytes are more than one conditional PUT carries "
                f"({LARGEST_CREATE}); put the data under a name of its own and create a small manifest of it"
            )
        self._act("put_once", name, self._create, self._full(name), data, volume=len(data))

    def put_file(self, local: Path, name: str, *, link: bool) -> None:
        """Replace the object by the contents of ``local``, in parallel parts where it is large."""
        del link  # nothing is shared with another machine
        volume = local.stat().st_size
        self._act("put_file", name, self._fs.put_file, str(local), self._full(name), volume=volume)

    def get_file(self, name: str, local: Path, *, link: bool) -> None:
        """Copy the object to ``local``, one ranged read at a time."""
        del link  # nothing is shared with another machine
        size = self.size(name)
        with local.open("wb") as file:
            for start in range(0, size, DOWNLOAD_CHUNK):
                end = min(start + DOWNLOAD_CHUNK, size)
                chunk = self._act(
                    "get_file", name, self._fs.cat_file, self._full(name), start=start, end=end, volume=end - start
                )
                file.write(chunk)

    def delete(self, name: str) -> None:
        """Remove the object."""
        try:
            self._act("delete", name, self._fs.rm_file, self._full(name))
        except FileNotFoundError:
            return

    def remove_folder(self, name: str) -> None:
        """Remove the folder and all that is left in it. In an object store nothing is: folders are parts of names there."""
        with suppress(FileNotFoundError):
            self._act("remove_folder", name, self._fs.rm, self._full(name), recursive=True)

    def _create(self, path: str, data: bytes, **kwargs: Any) -> None:
        try:
            if isinstance(self._fs, AsyncFileSystem):
                self._fs.pipe_file(path, data, mode="create", **kwargs)
            else:
                with _CREATE_LOCK:
                    self._fs.pipe_file(path, data, mode="create", **kwargs)
        except Exception as error:
            if _precondition_failed(error):
                raise FileExistsError(path) from error
            raise

    def _act(self, act: str, name: str, call: Callable[..., Any], *args: Any, volume: int = 0, **kwargs: Any) -> Any:
        """Do ``call`` within the limit for ``volume`` bytes."""
        limit = self._timeout + volume / SLOWEST_BYTES_PER_SECOND
        deadline = time.monotonic() + limit
        for attempt in itertools.count(1):
            allowed = max(0.05, min(limit / ATTEMPTS_IN_LIMIT, deadline - time.monotonic()))
            try:
                return self._attempt(call, allowed, *args, **kwargs)
            except (FileNotFoundError, FileExistsError):
                raise
            except Exception as error:
                pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt) * _JITTER.uniform(0.5, 1.0)
                out_of_time = time.monotonic() + pause >= deadline
                if _is_permanent(error) or out_of_time:
                    within = f" within {limit:.1f} s ({attempt} attempts)" if out_of_time else ""
                    raise StorageError(f"{act} {self._url(name)} failed{within}: {_reason(error)}") from error
                time.sleep(pause)
        raise AssertionError("unreachable")

    def _attempt(self, call: Callable[..., Any], seconds: float, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._fs, AsyncFileSystem):
            return call(*args, timeout=seconds, **kwargs)
        return _in_thread(call, seconds, *args, **kwargs)

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


def _precondition_failed(error: BaseException) -> bool:
    """True if the store refused the create because the object exists (s3fs makes EINVAL of HTTP 412)."""
    if isinstance(error, FileExistsError) or _response(error).get("Error", {}).get("Code") == "PreconditionFailed":
        return True
    return isinstance(error, OSError) and error.errno == errno.EINVAL and "pre-condition" in str(error).lower()


def _is_permanent(error: BaseException) -> bool:
    """True if another attempt cannot help."""
    status = _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    client_fault = 400 <= status < 500 and status not in _RETRIED_STATUS
    return client_fault or isinstance(error, _PERMANENT) or type(error).__name__ in _PERMANENT_NAMES


def _response(error: BaseException) -> dict[str, Any]:
    response = getattr(error.__cause__, "response", None)
    return response if isinstance(response, dict) else {}


def _reason(error: BaseException) -> str:
    text = str(error) or "no answer"
    if type(error).__name__ in _PERMANENT_NAMES or isinstance(error, PermissionError):
        text += "; check the credentials in the environment and what they are allowed to do"
    return f"{type(error).__name__}: {text}"


def _merged(defaults: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """``given`` over ``defaults``, mapping by mapping."""
    merged = dict(defaults)
    for key, value in given.items():
        inner = merged.get(key)
        merged[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged
