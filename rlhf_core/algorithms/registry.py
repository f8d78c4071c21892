"""Tables of named algorithms: adding twice and asking for an unknown name are errors that say what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

Entry = TypeVar("Entry")


def register(registry: dict[str, Entry], kind: str, name: str, entry: Entry) -> None:
    """Add an entry under a new name.

    Raises:
        ConfigError: the name is taken.
    """
    if name in registry:
        raise ConfigError(f"{kind} {name!r} is registered already: choose another name")
    registry[name] = entry


def look_up(registry: Mapping[str, Entry], kind: str, name: str) -> Entry:
    """The entry of a name.

    Raises:
        ConfigError: nothing has that name.
    """
    if name not in registry:
        raise ConfigError(f"unknown {kind} {name!r}: choose one of {', '.join(sorted(registry))}, or register your own")
    return registry[name]
