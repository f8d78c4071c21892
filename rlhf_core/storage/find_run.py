"""Runs as people name them."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from rlhf_core.config.model import StorageConfig
from rlhf_core.errors import ConfigError
from rlhf_core.storage.object_store import ObjectStore
from rlhf_core.storage.run_store import RUN_ID, RunStore

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BY_REWARDS = "rlhf"  # the kind of such a run, in run.json
_WILD = set("*?[")


def find_run(run: str, root: str | None = None, options: Mapping[str, Any] | None = None) -> RunStore:
    """The log of a run.

    Args:
        run: its id below ``root``, or its URL.
        root: storage.root; default: the default one.
        options: of the file system.

    Raises:
        ConfigError: there is no such run.
    """
    if "/" in run:
        root, _, run = run.rstrip("/").rpartition("/")
    store = RunStore(run, root or StorageConfig().root, dict(options or {}))
    if store.read_run() is None:
        raise ConfigError(f"no run at {store.url}: check the run id, or name its storage.root with --root")
    return store


def find_runs(
    names: Sequence[str], root: str | None = None, options: Mapping[str, Any] | None = None
) -> list[RunStore]:
    """The logs of several runs, each once, in the order named.

    Args:
        names: Ids below ``root``, URLs, or patterns of either with ``*``, ``?`` or ``[…]`` in the id; none: every run below
            ``root``.
        root: storage.root; default: the default one.
        options: of the file system.

    Raises:
        ConfigError: there is no such run, or none of that pattern.
    """
    found: dict[str, RunStore] = {}
    for name in names or ["*"]:
        runs = (
            _matching(name, root, options) if _WILD & set(name.rpartition("/")[2]) else [find_run(name, root, options)]
        )
        found |= {run.url: run for run in runs}
    return list(found.values())


def _matching(name: str, root: str | None, options: Mapping[str, Any] | None) -> list[RunStore]:
    """The runs of a pattern, by id."""
    folder, _, pattern = name.rpartition("/")
    root = folder or root or StorageConfig().root
    below = ObjectStore(root, dict(options or {}))
    ids = [child for child in below.children() if RUN_ID.fullmatch(child) and below.exists(f"{child}/run.json")]
    runs = [RunStore(run_id, root, dict(options or {})) for run_id in ids if fnmatchcase(run_id, pattern)]
    if not runs:
        there = f"there are {', '.join(ids[:20])}{' …' if len(ids) > 20 else ''}" if ids else "there is none at all"
        raise ConfigError(f"no run {pattern!r} below {below.root}: {there}; name their storage.root with --root")
    return runs


def check_has_trajectories(store: RunStore) -> dict[str, Any]:
    """run.json of a run by rewards; ``ConfigError`` for one of another kind, which samples nothing."""
    body = store.read_run() or {}
    kind = body.get("kind", BY_REWARDS)
    if kind != BY_REWARDS:
        raise ConfigError(f"{store.url} is a run of kind {kind!r}, which has no trajectories: name one of `rlhf train`")
    return body
