"""Objects in a bucket of an S3 store.

::

    small object    one PUT
    large object    parts, STREAMS at once ─▶ complete: visible whole or not at all
    create          one PUT with If-None-Match: *      never in parts: of racing completions several could win
    listing         a page at a time, so that a long one has no limit of its own

Every part, page and range has a limit of its own and is tried again by itself. Each PUT carries a checksum, which the store
compares with what arrived.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf_core.errors import StorageError
from rlhf_core.storage.backends.s3_client import SHARED_LINE, S3Client
from rlhf_core.storage.parallel import in_parallel
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

logger = get_logger(__name__)

Item = TypeVar("Item")

PART_BYTES = 8 * 2**20  # not under 5 MiB, which is S3's least
MOST_PARTS = 10_000  # S3's limit: a larger object gets larger parts
STREAMS = 4  # of one object at once; with PART_BYTES and checkpoints.TRANSFERS it bounds the memory of a transfer
ABORT_SECONDS = 5.0  # after a failure: the store may be away
LARGEST_BULK = 1000  # keys of one DeleteObjects
UPLOAD_MARK = "?uploadId="


class S3Backend(S3Client):
    """The acts of an object store on a bucket, or on a folder of one."""

    def read(self, name: str) -> bytes:
        """The whole object."""
        return b"".join(piece for _, piece in self._ranges("read", name))

    def pieces(self, name: str) -> Iterator[bytes]:
        """The object, a piece at a time."""
        start, total = 0, 1
        while start < total:
            piece, total = self._range("read", name, start, PART_BYTES)
            start += len(piece)
            yield piece

    def size(self, name: str) -> int:
        """Bytes of the object."""
        return int(self._head("size", name)["ContentLength"])

    def modified(self, name: str) -> float:
        """Unix seconds of the object's last change."""
        return float(self._head("modified", name)["LastModified"].timestamp())

    def sizes(self, prefix: str) -> dict[str, int]:
        """Every object below ``prefix`` and its bytes."""
        found = ((each["Key"], each["Size"]) for page in self._pages(prefix) for each in page.get("Contents", ()))
        return {self._relative_key(key): int(size) for key, size in found if not key.endswith("/")}

    def children(self, prefix: str) -> list[str]:
        """Names of the folders and objects directly below ``prefix``."""
        start = self._key(prefix, folder=True)
        names = set()
        for page in self._pages(prefix, Delimiter="/"):
            names |= {each["Prefix"] for each in page.get("CommonPrefixes", ())}
            names |= {each["Key"] for each in page.get("Contents", ())}
        return [name.removeprefix(start).rstrip("/") for name in names - {start}]

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Replace the object by one atomic act."""
        view = memoryview(data)
        self._send("put", name, len(data), lambda start, count: bytes(view[start : start + count]))

    def put_file(self, local: Path, name: str, *, link: bool) -> None:
        """Replace the object by the contents of ``local``, in parallel parts where it is large."""
        del link  # nothing is shared with another machine
        with _opened(local, os.O_RDONLY) as descriptor:
            size = os.fstat(descriptor).st_size
            self._send("put_file", name, size, lambda start, count: os.pread(descriptor, count, start))

    def get_file(self, name: str, local: Path, *, link: bool) -> None:
        """Copy the object to ``local``, in parallel ranges where it is large."""
        del link  # nothing is shared with another machine
        with _opened(local, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
            for start, piece in self._ranges("get_file", name):
                _write(descriptor, piece, start)

    def delete(self, name: str) -> None:
        """Remove the object."""
        with suppress(FileNotFoundError):
            self._ask("delete", name, "delete_object", Key=self._key(name))

    def remove_folder(self, name: str) -> None:
        """Remove the folder, all that is left in it, and the parts of objects that were never completed."""
        keys = [each["Key"] for page in self._pages(name) for each in page.get("Contents", ())]
        self._delete_all(name, keys)
        self._delete_all(name, list(self._folders(name)))
        try:
            for upload in self._uploads(name):
                self._abort(upload["Key"], upload["UploadId"])
        except StorageError as error:  # they cost money, and nothing else
            logger.warning("uploads that were never completed are left: %s", error)

    def half_written(self) -> dict[str, tuple[int, float]]:
        """Uploads in parts that were not completed: name -> (bytes, unix seconds of the last change)."""
        found = {}
        for upload in self._uploads(""):
            parts = self._parts(upload)
            changed = [upload["Initiated"], *(part["LastModified"] for part in parts if "LastModified" in part)]
            name = f"{self._relative_key(upload['Key'])}{UPLOAD_MARK}{upload['UploadId']}"
            found[name] = sum(part["Size"] for part in parts), max(changed).timestamp()
        return found

    def discard(self, name: str) -> None:
        """Remove what ``half_written`` named."""
        path, _, upload = name.partition(UPLOAD_MARK)
        self._ask("discard", path, "abort_multipart_upload", Key=self._key(path), UploadId=upload)

    def _create(self, name: str, data: bytes, **limits: Any) -> None:
        self._fs.call_s3("put_object", Bucket=self._bucket, Key=self._key(name), Body=data, IfNoneMatch="*", **limits)

    def _ranges(self, act: str, name: str) -> Iterator[tuple[int, bytes]]:
        """(start, bytes) of the whole object, in order; the first answer says how many there are."""
        first, total = self._range(act, name, 0, PART_BYTES)
        yield 0, first
        rest = range(len(first), total, PART_BYTES)
        yield from in_parallel(lambda start: (start, self._range(act, name, start, PART_BYTES)[0]), rest, STREAMS)

    def _send(self, act: str, name: str, size: int, cut: Callable[[int, int], bytes]) -> None:
        """``cut``: (start, count) -> those bytes of the object."""

        def piece(start: int, count: int) -> bytes:
            data = cut(start, count)
            if len(data) != count:
                raise StorageError(f"{act} {self._url(name)}: its source changed while it was sent")
            return data

        if size <= PART_BYTES:
            self._ask(act, name, "put_object", Key=self._key(name), Body=piece(0, size), volume=size * SHARED_LINE)
        elif not any(self._sent_in_parts(act, name, size, piece) for _ in range(2)):
            raise StorageError(
                f"{act} {self._url(name)} failed: its upload was aborted by something else, such as a rule of the bucket "
                "that removes uploads which are not completed: give it a longer time"
            )

    def _sent_in_parts(self, act: str, name: str, size: int, piece: Callable[[int, int], bytes]) -> bool:
        """False if the store does not know the upload in the end: aborted, or completed and the answer lost. Who can tell?"""
        key, step = self._key(name), max(PART_BYTES, -(-size // MOST_PARTS))
        upload = self._ask(act, name, "create_multipart_upload", Key=key)["UploadId"]

        def part(start: int) -> dict[str, Any]:
            count, number = min(step, size - start), start // step + 1
            arguments = {"Key": key, "UploadId": upload, "PartNumber": number, "Body": piece(start, count)}
            answer = self._ask(act, name, "upload_part", volume=count * SHARED_LINE, **arguments)
            checksums = {field: value for field, value in answer.items() if field.startswith("Checksum")}
            return {"PartNumber": number, "ETag": answer["ETag"], **checksums}

        try:
            parts = {"Parts": list(in_parallel(part, range(0, size, step), STREAMS))}
            arguments = {"Key": key, "UploadId": upload, "MultipartUpload": parts}
            self._ask(act, name, "complete_multipart_upload", volume=size, **arguments)
        except FileNotFoundError:
            self._abort(key, upload)
            return False
        except BaseException:
            self._abort(key, upload)
            raise
        return True

    def _abort(self, key: str, upload: str) -> None:
        """Whatever the store says: what stays is found by ``half_written``."""
        with suppress(Exception):
            self._attempt(
                self._fs.call_s3,
                ABORT_SECONDS,
                "abort_multipart_upload",
                Bucket=self._bucket,
                Key=key,
                UploadId=upload,
            )

    def _folders(self, name: str) -> Iterator[str]:
        """Folders are parts of names, but some stores keep them as things of their own; the deepest come first."""
        for page in self._pages(name, Delimiter="/"):
            for each in page.get("CommonPrefixes", ()):
                yield from self._folders(self._relative_key(each["Prefix"]).rstrip("/"))
        yield self._key(name, folder=True)

    def _delete_all(self, name: str, keys: Sequence[str]) -> None:
        for batch in _batches(keys, LARGEST_BULK):
            wanted = {"Objects": [{"Key": key} for key in batch], "Quiet": True}
            answer = self._ask("remove_folder", name, "delete_objects", Delete=wanted)
            if refused := answer.get("Errors", ()):
                first = refused[0]
                raise StorageError(
                    f"remove_folder {self._url(name)} failed for {len(refused)} objects, such as {first.get('Key')}: "
                    f"{first.get('Code')} {first.get('Message', '')}"
                )


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: bytes, start: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, start)
        view, start = view[written:], start + written


def _batches(items: Sequence[Item], count: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), count):
        yield items[start : start + count]
