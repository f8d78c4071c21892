"""How far the files of an offline run go, which W&B writes out every 15 seconds: an attempt that was killed had said more.

::

    {folder}/wandb/offline-run-{time}-{run id}/run-{run id}.wandb       one of each attempt

    header  ":W&B" magic version         7 bytes
    blocks of 32 KiB                     LevelDB's log format, with zlib's CRC-32
      crc length kind data               kind: whole, or the first, a middle or the last piece of a record
"""

from __future__ import annotations

import json
import struct
import zlib
from glob import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCK = 32 * 1024
HEADER = struct.Struct("<4sHB")
IDENTITY = b":W&B"
PIECE = struct.Struct("<IHB")  # CRC of kind and data, length of the data, kind
WHOLE, FIRST, _, LAST = 1, 2, 3, 4  # kinds


def told_offline(folder: Path, run_id: str) -> dict[str, int]:
    """What the files of all attempts have together, as ``Told`` counts it.

    Args:
        folder: ``$WANDB_DIR``.
        run_id: of the run.
    """
    told = {"iterations": 0, "evaluated": -1}
    for file in folder.glob(f"wandb/offline-run-*/run-{escape(run_id)}.wandb"):
        for row in history(file):
            told["iterations"] = max(told["iterations"], int(row.get("iteration", -1)) + 1)
            told["evaluated"] = max(told["evaluated"], int(row.get("eval/version", -1)))
    return told


def history(file: Path) -> Iterator[dict[str, float]]:
    """The rows of a file, up to where it was cut off."""
    from wandb.proto.wandb_internal_pb2 import Record

    for data in records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = record.history.item
            yield {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}


def records(body: bytes) -> Iterator[bytes]:
    """The records of a file, whole ones only."""
    if body[: len(IDENTITY)] != IDENTITY:
        return
    place, pieces = HEADER.size, b""
    while place + PIECE.size <= len(body):
        left = BLOCK - place % BLOCK
        if left < PIECE.size:  # of the block: padding
            place += left
            continue
        crc, length, kind = PIECE.unpack_from(body, place)
        place += PIECE.size
        data = body[place : place + length]
        if len(data) < length or zlib.crc32(data, zlib.crc32(bytes([kind]))) != crc:
            return
        place += length
        pieces = data if kind in (WHOLE, FIRST) else pieces + data
        if kind in (WHOLE, LAST):
            yield pieces
