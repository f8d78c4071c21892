"""Packed weights on their way to engines of other nodes, which cannot open a file of the sender's.

::

    node A    training rank 0 ──▶ packed file ──▶ engines of A
                                      │ read_pieces ─▶ Ray's object stores, over the network
    node B                            └─▶ one engine of B: write_pieces ──▶ packed file ──▶ engines of B, and it is deleted

So a node gets the weights once, however many engines it has; each proves them by their checksum as if they were local.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from rlhf_core.cluster.address import node_id
from rlhf_core.errors import WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.weights import WeightUpdate

PIECE_BYTES = 64 * 2**20  # so many are in memory twice, at both ends


def read_pieces(path: Path) -> list[Any]:
    """A file as objects of Ray, in order; they are gone once nobody holds these references."""
    pieces = []
    with path.open("rb") as file:
        while len(piece := np.fromfile(file, dtype=np.uint8, count=PIECE_BYTES)):
            pieces.append(ray.put(piece))
    return pieces


def write_pieces(update: WeightUpdate, nbytes: int, pieces: Sequence[Any], run_id: str) -> WeightUpdate:
    """The file on this node. Returns the update that names it.

    Args:
        update: names the file of the sender's node.
        nbytes: its size.
        pieces: of it, by ``read_pieces``.
        run_id: of the run.

    Raises:
        WeightSyncError: there is no room for it.
    """
    from rlhf_core.weights import scratch_folder  # torch, which the controller must not load

    stem = f"rlhf-{run_id}@{node_id()[:12]}"  # several nodes of one machine have one shared memory
    folder = scratch_folder(nbytes)
    for left in folder.glob(f"{stem}-v*.pack"):  # by an engine that was killed
        left.unlink(missing_ok=True)
    path = folder / f"{stem}-v{update.version:08d}.pack"
    try:
        path.touch(mode=0o600)  # shared memory is open to every user of the machine
        with path.open("wb") as file:
            for piece in pieces:
                file.write(memoryview(ray.get(piece)))
    except OSError as error:
        path.unlink(missing_ok=True)
        raise WeightSyncError(f"cannot write the weights of version {update.version} to {path}: {error}") from error
    return replace(update, payload={**update.payload, "path": str(path)})


def delete(update: WeightUpdate) -> None:
    """The file that it names."""
    Path(update.payload["path"]).unlink(missing_ok=True)
