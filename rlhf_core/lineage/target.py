"""A run, or a version of one, as people name it.

::

    first, s3://bucket/runs/first          a run
    first@best, run:first@12               a checkpoint of it, as configurations name models
    s3://…/first/checkpoints/v00000012     the same, by its folder or anything in it
    first-v00000012                        the same, as MLflow names it
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.config.model_spec import parse_run_model
from rlhf_core.errors import ConfigError
from rlhf_core.storage import CheckpointStore, RunStore, stored_best
from rlhf_core.storage.find_run import find_run

if TYPE_CHECKING:
    from collections.abc import Mapping

_FOLDER = re.compile(r"(?P<run>.+)/checkpoints/v(?P<version>\d{8,})(/.*)?")
_SPEC = re.compile(r"(?P<run>.+)@(?P<which>best|latest|\d+)")
_IN_MLFLOW = re.compile(r"(?P<run>.+)-v(?P<version>\d{8,})")


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked for."""

    store: RunStore
    version: int | None  # None: the run as a whole


def find_target(name: str, root: str | None = None, options: Mapping[str, Any] | None = None) -> Target:
    """What ``name`` means now.

    Args:
        name: see the top of this module.
        root: storage.root of the run, where ``name`` is no URL; default: the default one.
        options: of the file system.

    Raises:
        ConfigError: there is no such run, or no such version of it.
    """
    if folder := _FOLDER.fullmatch(name):
        return Target(find_run(folder["run"], root, options), int(folder["version"]))
    if spec := _SPEC.fullmatch(name):
        return _version_of(find_run(_run_of(spec["run"]), root, options), spec["which"])
    try:
        return Target(find_run(_run_of(name), root, options), None)
    except ConfigError:
        told = _IN_MLFLOW.fullmatch(name)
        if told is None:
            raise
        return _version_of(find_run(told["run"], root, options), told["version"])


def _run_of(name: str) -> str:
    """The id or URL in a ``run:`` name."""
    if not name.startswith("run:"):
        return name
    named = parse_run_model(name)
    return named.run_id if named.root is None else f"{named.root}/{named.run_id}"


def _version_of(store: RunStore, which: str) -> Target:
    if which == "best":
        best = stored_best(store)
        if best is None:
            raise ConfigError(f"{store.url} has no best checkpoint: name a version, or the newest with @latest")
        return Target(store, best.version)
    if which == "latest":
        newest = CheckpointStore(store).newest()
        if newest is None:
            raise ConfigError(f"{store.url} has no complete checkpoint yet: name the run itself")
        return Target(store, newest[0])
    version = int(which)
    update = store.newest_update()
    made = 0 if update is None else update[0] + 1
    if version > made:
        raise ConfigError(f"{store.url} has no version {version}: its log goes up to version {made}")
    return Target(store, version)
