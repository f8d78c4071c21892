"""``I..J``: which iterations of a run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

_RANGE = re.compile(r"(\d+)(?:\.\.(\d+))?")


def parse_iterations(text: str) -> tuple[int, int]:
    """``3..7``, or ``3`` alone, as (first, last), both of them included.

    Raises:
        ConfigError: it is no such range, or an empty one.
    """
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"iterations {text!r}: write first..last, such as 0..9, or one number")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ConfigError(f"iterations {text!r}: the last one comes before the first: write {last}..{first}")
    return first, last


def within(iterations: str | None, there: Sequence[int], url: str) -> list[int]:
    """Those of ``there`` that are asked for.

    Args:
        iterations: ``I..J``; None: all.
        there: iterations of a run that can be used, ascending.
        url: of the run, for messages.

    Raises:
        ConfigError: there is none.
    """
    first, last = parse_iterations(iterations) if iterations is not None else (0, max(there, default=0))
    found = [iteration for iteration in there if first <= iteration <= last]
    if not found:
        has = f"{there[0]}..{there[-1]}" if there else "none"
        asked = f"{iterations} " if iterations is not None else ""
        raise ConfigError(f"{url} has no complete iteration {asked}with trajectories; it has {has}")
    return found
