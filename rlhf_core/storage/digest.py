"""What an object hashes to."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future
    from pathlib import Path


def sha256_of(data: bytes | memoryview) -> str:
    """Hex sha256 of bytes."""
    return hashlib.sha256(data).hexdigest()


@contextmanager
def hashing(data: bytes | memoryview) -> Iterator[Future[str]]:
    """Their hex sha256, in the making on another core while the block runs."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="sha256") as thread:
        yield thread.submit(sha256_of, data)


def sha256_of_file(path: Path) -> str:
    """Hex sha256 of a file, streamed."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
