"""How numbers of things, and of bytes, are written."""

from __future__ import annotations


def count(number: int, what: str = "object") -> str:
    """``1 object``, ``2 objects``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def size(of: float) -> str:
    """Bytes in a unit that people read."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if of < 1024:
            return f"{of:.0f} {unit}" if unit == "B" else f"{of:.1f} {unit}"
        of /= 1024
    return f"{of:.1f} TiB"
