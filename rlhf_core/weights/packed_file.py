"""A model's tensors in one file in shared memory, read without copying.

::

    0        64                                         toc                         end
    │preamble│ tensor 0 │pad│ tensor 1 │pad│ … │ tensor N-1 │ table of contents, JSON │
        │     each on a multiple of 64 bytes, raw             ▲  version, checksum, and
        └── magic, format, where the table lies, its crc ─────┘  name, dtype, shape, offset of each

Written in one pass under a temporary name, the preamble last, then renamed: a file with the final name is whole, and a
truncated, stale, foreign or damaged one is refused when it is opened. ``write_packed`` runs in the trainer's sending
rank, ``open_packed`` in every engine worker; both must run on one machine
(``cluster.weight_relay`` brings the file to others).
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import shutil
import struct
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from rlhf_core.errors import WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ALIGNMENT = 64  # a cache line, and enough for every vector instruction that reads the tensors in place
MAGIC = b"RLHFPACK"
FORMAT = 1
SHARED_MEMORY = Path("/dev/shm")
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_PREAMBLE = struct.Struct("<8sIIQQ")  # magic, format, crc32 of the table, its offset, its length
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """One line of the table of contents."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.numel * int(DTYPES[self.dtype].itemsize)


class PackedWeights:
    """An open packed file whose bytes are proved; its tensors live as long as it or any of them is held.

    The mapping is copy-on-write: who writes into a tensor changes neither the file nor another reader's tensors.
    """

    def __init__(self, path: Path, version: int, checksum: str, table: list[PackedTensor], data: mmap.mmap) -> None:
        self.path = path
        self.version = version
        self.checksum = checksum
        self._table = table
        self._data = data

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) in the order they were written."""
        for entry in self._table:
            yield entry.name, self._tensor(entry)

    def _tensor(self, entry: PackedTensor) -> torch.Tensor:
        dtype = DTYPES[entry.dtype]
        if entry.numel == 0:
            return torch.empty(entry.shape, dtype=dtype)
        flat = torch.frombuffer(self._data, dtype=dtype, count=entry.numel, offset=entry.offset)
        return flat.reshape(entry.shape)


def scratch_folder(nbytes: int) -> Path:
    """Where a packed file of ``nbytes`` can be written: shared memory, else the temporary folder ($TMPDIR).

    Raises:
        WeightSyncError: neither has the room.
    """
    candidates = [SHARED_MEMORY, Path(tempfile.gettempdir())]
    usable = [folder for folder in candidates if folder.is_dir() and os.access(folder, os.W_OK)]
    for folder in usable:
        if shutil.disk_usage(folder).free > nbytes:
            return folder
    raise WeightSyncError(f"no room for {_gib(nbytes)} of weights in {' or '.join(map(str, usable))}: {_REMEDY}")


def write_packed(path: Path, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> str:
    """Write ``tensors`` (fp32, bf16 or fp16, any device) as one packed file and return its checksum.

    Raises:
        WeightSyncError: the file system is full, or a tensor has another type.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.touch(mode=0o600)  # shared memory is open to every user of the machine
        with partial.open("wb") as file:
            checksum = _write(file, tensors, version)
        partial.rename(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise WeightSyncError(
                f"no room for the weights of version {version} in {path.parent}: {_REMEDY}"
            ) from error
        raise WeightSyncError(f"cannot write the weights of version {version} to {path}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return checksum


def open_packed(path: Path, version: int | None = None, checksum: str | None = None) -> PackedWeights:
    """Map a packed file and prove it: whole, of this ``version`` and ``checksum`` where they are given.

    Raises:
        WeightSyncError: what is wrong with it.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise WeightSyncError(
            f"cannot read packed weights {path}: {error}; the engine's processes must share one machine and "
            f"its {path.parent}"
        ) from error
    contents = _contents(path, data)
    found_version, found_checksum = contents["version"], contents["checksum"]
    if version is not None and found_version != version:
        raise WeightSyncError(f"packed weights {path} hold policy version {found_version}, not {version}: a stale file")
    table = [PackedTensor(name, dtype, tuple(shape), offset) for name, dtype, shape, offset in contents["tensors"]]
    actual = _checksum_of(table, data)
    for expected in (found_checksum, checksum):
        if expected is not None and actual != expected:
            raise WeightSyncError(
                f"packed weights {path} have checksum {actual}, not {expected}: damaged or replaced; send them again"
            )
    return PackedWeights(path, found_version, actual, table, data)


_REMEDY = (
    "enlarge shared memory (docker run --shm-size, Kubernetes emptyDir with medium Memory), or set TMPDIR to a folder "
    "with room"
)


def _write(file: BinaryIO, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> str:
    table: list[PackedTensor] = []
    crc = 0
    offset = _padded(file, _PREAMBLE.size)
    for name, tensor in tensors:
        entry = PackedTensor(name, _dtype_name(name, tensor), tuple(tensor.shape), offset)
        payload = _bytes_of(tensor)
        crc = zlib.crc32(payload, zlib.crc32(_label(entry), crc))
        file.write(payload)
        offset = _padded(file, offset + entry.nbytes)
        table.append(entry)
    checksum = f"{crc:08x}"
    lines = [[entry.name, entry.dtype, entry.shape, entry.offset] for entry in table]
    contents = json.dumps({"version": version, "checksum": checksum, "tensors": lines}).encode()
    file.write(contents)
    file.seek(0)
    file.write(_PREAMBLE.pack(MAGIC, FORMAT, zlib.crc32(contents), offset, len(contents)))
    return checksum


def _contents(path: Path, data: mmap.mmap) -> dict[str, Any]:
    if len(data) < _PREAMBLE.size:
        raise WeightSyncError(f"packed weights {path} are truncated: {len(data)} bytes")
    magic, format_, crc, offset, length = _PREAMBLE.unpack_from(data)
    if magic != MAGIC:
        raise WeightSyncError(f"{path} is not a finished file of packed weights")
    if format_ != FORMAT:
        raise WeightSyncError(f"packed weights {path} have format {format_}, this version reads {FORMAT}: update both")
    if offset + length != len(data):
        raise WeightSyncError(f"packed weights {path} are truncated: {len(data)} of {offset + length} bytes")
    text = data[offset : offset + length]
    if zlib.crc32(text) != crc:
        raise WeightSyncError(f"packed weights {path} have a damaged table of contents; send them again")
    contents: dict[str, Any] = json.loads(text)
    return contents


def _checksum_of(table: list[PackedTensor], data: mmap.mmap) -> str:
    crc = 0
    with memoryview(data) as view:
        for entry in table:
            crc = zlib.crc32(_label(entry), crc)
            with view[entry.offset : entry.offset + entry.nbytes] as payload:
                crc = zlib.crc32(payload, crc)
    return f"{crc:08x}"


def _label(entry: PackedTensor) -> bytes:
    """What the checksum covers besides the bytes, so that swapped names or shapes are seen too."""
    return f"{entry.name}:{entry.dtype}:{entry.shape}".encode()


def _dtype_name(name: str, tensor: torch.Tensor) -> str:
    try:
        return _NAMES[tensor.dtype]
    except KeyError:
        raise WeightSyncError(
            f"tensor {name} has type {tensor.dtype}: packed weights hold {', '.join(DTYPES)}"
        ) from None


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def _padded(file: BinaryIO, end: int) -> int:
    """Fill up to the next aligned offset, and return it."""
    aligned = -(-end // ALIGNMENT) * ALIGNMENT
    file.write(bytes(aligned - file.tell()))
    return aligned


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
