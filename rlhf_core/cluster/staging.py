"""Where a worker keeps the files of a checkpoint on their way to or from the store."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.errors import StorageError
from rlhf_core.storage.digest import sha256_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlhf_core.storage import RunStore

FULL_BYTES = 64 * 2**20  # with less free, a file of a checkpoint did not fit


@contextmanager
def staging(store: RunStore, worker: str) -> Iterator[Path]:
    """An empty folder below $TMPDIR while the block lasts.

    It is the same one each time: what a process left that was killed in the middle is removed by its successor, so that a
    worker never takes more of the disk than its share of one checkpoint.

    Raises:
        StorageError: the folder is another user's; or what failed in the block failed on a full disk, whatever the library that
            wrote there made of it.
    """
    root = Path(tempfile.gettempdir()) / f"rlhf-staging-{os.getuid()}"
    folder = root / sha256_of(store.url.encode())[:16] / worker
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if root.lstat().st_uid != os.getuid():
        raise StorageError(f"{root} belongs to another user of this machine, who could exchange the files: set TMPDIR")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    try:
        yield folder
    except Exception as error:
        free = shutil.disk_usage(folder).free
        if free < FULL_BYTES:
            raise StorageError(
                f"{folder} is on a full disk ({free / 2**20:.0f} MiB left): make room, or set TMPDIR to a larger one ({error})"
            ) from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
