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
    """Those of ``there`` that are asked for: each of them has to be there, so that nothing is left out in silence.

    Args:
        iterations: ``I..J``; None: all.
        there: iterations of a run that can be used, ascending.
        url: of the run, for messages.

    Raises:
        ConfigError: one is missing, or there is none at all.
    """
    if not there:
        raise ConfigError(f"{url} has no complete iteration with trajectories: let it run first")
    if iterations is None:
        return list(there)
    first, last = parse_iterations(iterations)
    found = [iteration for iteration in there if first <= iteration <= last]
    held = set(found)
    missing = next((i for i in range(first, last + 1) if i not in held), None)
    if missing is not None:
        has = f"{there[0]}..{there[-1]}"
        raise ConfigError(
            f"iterations {iterations}: {url} has no complete iteration {missing} with trajectories; it has {has}"
        )
    return found
