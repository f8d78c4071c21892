"""Where two configurations, or any two trees of plain values, differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], ignored: Collection[str] = (), prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Dotted keys with different values: (old, new); None where there is no such key.

    Args:
        old: a tree.
        new: a tree.
        ignored: dotted keys, of values or of whole sections, that are not looked at.
        prefix: put before each key.
    """
    changed: dict[str, tuple[Any, Any]] = {}
    for key in old.keys() | new.keys():
        path = prefix + key
        if path in ignored:
            continue
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            changed.update(differences(before, after, ignored, f"{path}."))
        elif before != after:
            changed[path] = (before, after)
    return changed
