"""What an object hashes to."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def sha256_of(data: bytes) -> str:
    """Hex sha256 of bytes."""
    return hashlib.sha256(data).hexdigest()


def sha256_of_file(path: Path) -> str:
    """Hex sha256 of a file, streamed."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
