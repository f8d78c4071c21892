"""The images that a run's trajectories show: each once, under the sha256 of its bytes.

::

    PNG ─ put_image ─▶ images/{sha256}.png ◀─ named by the rows that show it (ImageRef.uri)

No document names an image: the rows of the shards do. ``images_in`` says which.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from rlhf_core.errors import ConflictError, CorruptShardError
from rlhf_core.storage.digest import sha256_of
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from rlhf_core.storage.object_store import ObjectStore

logger = get_logger(__name__)

FOLDER = "images"
IMAGE = re.compile(rf"{FOLDER}/(?P<sha256>[0-9a-f]{{64}})\.png")


def put_image(objects: ObjectStore, png: bytes) -> str:
    """Make an image durable, once; returns its path. One that is there already is left, unless it is damaged."""
    path = f"{FOLDER}/{sha256_of(png)}.png"
    try:
        objects.put_once(path, png)
    except ConflictError:
        logger.warning("%s is damaged: written again", objects.url(path))
        objects.put(path, png)
    return path


def get_image(objects: ObjectStore, path: str) -> bytes:
    """The bytes of an image.

    Raises:
        CorruptShardError: it is missing or damaged, or ``path`` names no image. The message names it.
    """
    url = objects.url(path)
    claim = IMAGE.fullmatch(path)
    if claim is None:
        raise CorruptShardError(f"{url} is named by a row as its image, and is not the path of one")
    try:
        data = objects.read(path)
    except FileNotFoundError as error:
        raise CorruptShardError(f"{url} is missing: a row shows this image") from error
    found = sha256_of(data)
    if found != claim["sha256"]:
        raise CorruptShardError(f"{url} is damaged: its sha256 is {found}, recorded was {claim['sha256']}")
    return data


def images_in(table: pa.Table) -> list[str]:
    """The paths of the images that the rows of a table with the column ``images`` show, each once."""
    shown = [chunk.flatten().field("uri") for chunk in table["images"].chunks]
    return sorted(pc.unique(pa.chunked_array(shown, pa.string())).to_pylist())
