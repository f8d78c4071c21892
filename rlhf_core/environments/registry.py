"""The collections that environments come from, each imported when one of its environments is made."""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rlhf_core.environments.base import TextEnvironment
    from rlhf_core.environments.spec import EpisodeSpec

# name -> module with ``make(EpisodeSpec) -> TextEnvironment`` and ``prepare()``, which imports what is slow to import
COLLECTIONS = {
    "reasoning_gym": "rlhf_core.environments.reasoning",
    "textarena": "rlhf_core.environments.arena",
    "gymnasium": "rlhf_core.environments.toy_text",
}


def make_environment(episode: EpisodeSpec) -> TextEnvironment:
    """The environment of an episode, not yet reset.

    Raises:
        ConfigError: there is no such environment, its package is not installed, or an option is not one of its own.
    """
    made: Callable[[EpisodeSpec], TextEnvironment] = _module(episode.collection).make
    return made(episode)


def prepare(collections: Iterable[str]) -> None:
    """Import what environments of these collections need: once, in a process that is then forked for each episode.

    Raises:
        ConfigError: there is no such collection, or its package is not installed.
    """
    for collection in sorted(set(collections)):
        _module(collection).prepare()


def unknown(what: str, name: str, known: Sequence[str]) -> ConfigError:
    """The error of a name that is not there: with those that are much like it, else with some that are."""
    lowered = {one.lower(): one for one in known}
    near = [lowered[one] for one in difflib.get_close_matches(name.lower(), list(lowered), n=3, cutoff=0.7)]
    said = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(known)[:12])}"
    said += "" if near or len(known) <= 12 else f" and {len(known) - 12} more"
    return ConfigError(f"there is no {what} {name!r}: {said}")


def _module(collection: str) -> Any:
    if collection not in COLLECTIONS:
        raise unknown("collection of environments", collection, list(COLLECTIONS))
    return importlib.import_module(COLLECTIONS[collection])
