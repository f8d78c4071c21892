"""Tables of named algorithms: asking for an unknown name is an error that says what there is."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

Entry = TypeVar("Entry")


def look_up(registry: Mapping[str, Entry], kind: str, name: str) -> Entry:
    """The entry of a name.

    Raises:
        ConfigError: nothing has that name.
    """
    if name not in registry:
        raise ConfigError(f"unknown {kind} {name!r}: choose one of {', '.join(sorted(registry))}")
    return registry[name]
