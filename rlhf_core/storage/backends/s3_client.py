"""Requests to a bucket of an S3 store.

s3fs gives the client, its credentials (from wherever botocore finds them, renewed before they expire) and its event loop;
limits and further attempts are those of ``RemoteBackend``.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fsspec.asyn import sync

from rlhf_core.storage.backends.remote import RemoteBackend
from rlhf_core.storage.backends.remote_errors import code_of

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARED_LINE = 16  # streams of a process at once; a part may take as many times longer
DEFAULTS: dict[str, Any] = {
    "use_listings_cache": False,
    "config_kwargs": {
        "connect_timeout": 5,
        "read_timeout": 3600,  # the limit of the attempt comes first
        "retries": {"max_attempts": 1, "mode": "standard"},  # retries are ours, with a limit over all of them
        "s3": {"addressing_style": "path"},  # what every store knows
        "max_pool_connections": SHARED_LINE,
    },
}

# A forked child lets go of its parent's clients, and closing them takes their sockets out of the parent's epoll, which the
# two share: the parent would wait in vain for its next answer.
_KEPT: set[Any] = set()


class S3Client(RemoteBackend):
    """The requests that the acts of ``S3Backend`` are made of."""

    def __init__(self, root: str, options: dict[str, Any], timeout: float) -> None:
        super().__init__(root, _merged(DEFAULTS, options), timeout)
        self._fs.retries = 1  # as in DEFAULTS
        _KEPT.add(self._fs)
        self._bucket, _, self._folder = self._base.partition("/")

    def _head(self, act: str, name: str) -> dict[str, Any]:
        answer: dict[str, Any] = self._ask(act, name, "head_object", Key=self._key(name))
        return answer

    def _range(self, act: str, name: str, start: int, count: int) -> tuple[bytes, int]:
        """At most ``count`` bytes of the object from ``start``, and the bytes of the whole object."""
        volume = count * (SHARED_LINE if start else 1)
        found: tuple[bytes, int] = self._act(act, name, self._get, self._key(name), start, count, volume=volume)
        return found

    def _get(self, key: str, start: int, count: int, timeout: float) -> tuple[bytes, int]:
        async def get() -> tuple[bytes, int]:
            wanted = {"Bucket": self._bucket, "Key": key, "Range": f"bytes={start}-{start + count - 1}"}
            try:
                answer = await self._fs._call_s3("get_object", **wanted)
            except OSError as error:
                if code_of(error) == "InvalidRange" and start == 0:  # an empty object has no first byte
                    return b"", 0
                raise
            async with answer["Body"] as body:
                data = await body.read()
            total = int(answer["ContentRange"].rpartition("/")[2])
            due = min(count, total - start)
            if len(data) != due:
                raise OSError(f"{len(data)} bytes came where {due} were due: truncated on the way")
            return data, total

        found: tuple[bytes, int] = sync(self._fs.loop, get, timeout=timeout)
        return found

    def _pages(self, prefix: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        token: dict[str, Any] = {}
        while True:
            page = self._ask(
                "list", prefix, "list_objects_v2", Prefix=self._key(prefix, folder=True), **token, **arguments
            )
            yield page
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def _uploads(self, prefix: str) -> Iterator[dict[str, Any]]:
        marks: dict[str, Any] = {}
        while True:
            page = self._ask(
                "list uploads", prefix, "list_multipart_uploads", Prefix=self._key(prefix, folder=True), **marks
            )
            yield from page.get("Uploads", ())
            if not page.get("IsTruncated"):
                return
            marks = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _parts(self, upload: dict[str, Any]) -> list[dict[str, Any]]:
        """Of one upload; none if it has ended meanwhile."""
        found: list[dict[str, Any]] = []
        mark: dict[str, Any] = {}
        name = self._relative_key(upload["Key"])
        with suppress(FileNotFoundError):
            while True:
                page = self._ask(
                    "list uploads", name, "list_parts", Key=upload["Key"], UploadId=upload["UploadId"], **mark
                )
                found += page.get("Parts", ())
                if not page.get("IsTruncated"):
                    break
                mark = {"PartNumberMarker": page["NextPartNumberMarker"]}
        return found

    def _ask(self, act: str, name: str, method: str, *, volume: int = 0, **arguments: Any) -> Any:
        return self._act(act, name, self._fs.call_s3, method, Bucket=self._bucket, volume=volume, **arguments)

    def _renew_credentials(self) -> None:
        with suppress(Exception):  # the next attempt says what is wrong with them
            self._fs.connect(refresh=True, timeout=self._timeout)

    def _place(self) -> str:
        client = self._fs._s3
        at = "" if client is None else f" at {client.meta.endpoint_url}"
        return f"bucket {self._bucket}{at}"

    def _no_bucket(self) -> str:
        return f"there is no {self._place()}: create it, or correct storage.root or AWS_ENDPOINT_URL"

    def _key(self, name: str, *, folder: bool = False) -> str:
        key = "/".join(filter(None, (self._folder, name)))
        return f"{key}/" if folder and key else key

    def _relative_key(self, key: str) -> str:
        return key.removeprefix(f"{self._folder}/") if self._folder else key


def _merged(defaults: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """``given`` over ``defaults``, mapping by mapping."""
    merged = dict(defaults)
    for key, value in given.items():
        inner = merged.get(key)
        merged[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged
