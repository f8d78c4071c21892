"""What one run takes over from another: the same verified bytes, in a log of its own.

A run that trains on another's trajectories must stay readable when that one is gone. On one disk the two share their blocks:
objects are replaced whole, never changed in place.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.config.model_spec import ADAPTER_EXPORT, AVERAGE_EXPORT, EXPORT
from rlhf_core.errors import CorruptShardError, StorageError
from rlhf_core.records import Stage
from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.storage.images import images_in
from rlhf_core.storage.paths import stage_folder
from rlhf_core.storage.shards import schema
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.records import Part
    from rlhf_core.storage.run_store import RunStore

logger = get_logger(__name__)

EXPORTS = {EXPORT, AVERAGE_EXPORT, ADAPTER_EXPORT}  # folders of a checkpoint that training does not go on from


def adopt_parts(store: RunStore, source: RunStore, parts: Sequence[Part], iteration: int, stage: Stage) -> list[Part]:
    """Parts of another run as parts of a stage of this one; what is there already is written over by itself.

    The images that trajectories show come along.

    Raises:
        CorruptShardError: a part or an image is missing, or is not the one recorded. It names the source's object.
    """
    folder = stage_folder(iteration, stage)
    adopted = []
    for part in parts:
        data = source.read_part(part)
        if stage is Stage.ROLLOUT:
            for image in images_in(source.decode_part(part, data, schema.TRAJECTORY, ["images"])):
                if not store.objects.exists(image):
                    _adopt(store, source, image, source.get_image(image), image)
        path = f"{folder}/{part.path.rpartition('/')[2]}"
        _adopt(store, source, part.path, data, path)
        adopted.append(replace(part, path=path))
    return adopted


def _adopt(store: RunStore, source: RunStore, path: str, data: bytes | memoryview, new_path: str) -> None:
    """One object whose verified bytes are ``data``."""
    local = source.objects.local_path(path)
    if local is None:
        store.objects.put(new_path, data)
    else:
        store.objects.put_file(local, new_path, link=True)


def adopt_stage(store: RunStore, source: RunStore, iteration: int, stage: Stage) -> None:
    """A complete stage of another run, its manifest included, as the same stage of this one.

    Raises:
        StorageError: the other run has not completed it.
        CorruptShardError: as ``adopt_parts``.
    """
    found = source.stage(iteration, stage)
    if found is None:
        raise StorageError(f"{source.manifest_url(iteration, stage)} is missing: the stage is not complete there")
    manifest = found[0]
    parts = adopt_parts(store, source, manifest.parts, iteration, stage)
    # `inputs` are digests of that run's manifests, which carry its name.
    store.commit(replace(manifest, run_id=store.run_id, parts=tuple(parts), inputs={}))


def adopt_newest_checkpoint(store: RunStore, source: RunStore, up_to: int) -> int:
    """The training state of the newest whole checkpoint of a version up to ``up_to``; damaged ones are passed over.

    Returns:
        Its version; 0, where training began, if there is none.
    """
    theirs, own = CheckpointStore(source), CheckpointStore(store)
    while (found := theirs.newest(up_to)) is not None:
        version, body = found
        if own.get(version) is not None:
            return version
        with tempfile.TemporaryDirectory(prefix="rlhf-adopt-") as staging:
            try:
                for folder in _folders_of_state(theirs, version):
                    theirs.download(version, Path(staging) / folder, folder, link=True)
            except CorruptShardError as error:
                logger.warning("checkpoint passed over: %s", error)
                up_to = version - 1
                continue
            files = own.add_files(version, Path(staging))
        own.commit(version, {key: value for key, value in body.items() if key != "files"}, files)
        return version
    return 0


def _folders_of_state(checkpoints: CheckpointStore, version: int) -> list[str]:
    """Folders of a checkpoint without the models that it exports for others; none lies below another one."""
    folders: list[str] = []
    for folder in sorted({entry.path.rpartition("/")[0] for entry in checkpoints.files(version)}):
        if not EXPORTS & set(folder.split("/")) and not any(folder.startswith(f"{upper}/") for upper in folders):
            folders.append(folder)
    return folders
