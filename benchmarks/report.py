"""What every benchmark does with its figures."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def finish(
    name: str, sides: dict[str, list[float]], ratio: float, unit: str, facts: dict[str, Any], path: str | None
) -> None:
    """Print a table and write the JSON.

    Args:
        name: of the benchmark.
        sides: the repeats of each side.
        ratio: the figure.
        unit: of the repeats.
        facts: sizes, and whatever explains the figure.
        path: where the JSON goes; None: nowhere.
    """
    print(f"{name}: {', '.join(f'{key}={value}' for key, value in facts.items())}")
    for side, repeats in sides.items():
        shown = "  ".join(f"{value:.4g}" for value in repeats)
        print(f"  {side:<18} median {statistics.median(repeats):.4g} {unit}   ({shown})")
    print(f"  ratio              {ratio:.3f}")
    if path is not None:
        body = {"name": name, "ratio": ratio, "unit": unit, "sides": sides, **facts}
        Path(path).write_text(json.dumps(body, indent=1, allow_nan=False))


def finish_table(
    name: str, rows: Mapping[str, Mapping[str, float]], ratio: float, facts: Mapping[str, Any], path: str | None
) -> None:
    """Print a table of what was compared, one row each, and write the JSON.

    Args:
        name: of the benchmark.
        rows: name -> figure by column, the same columns in each.
        ratio: the figure to hold.
        facts: as of ``finish``.
        path: as of ``finish``.
    """
    print(f"{name}: {', '.join(f'{key}={value}' for key, value in facts.items())}")
    columns = list(next(iter(rows.values())))
    print("  ".join([" " * 18, *(f"{column:>12}" for column in columns)]))
    for row, figures in rows.items():
        print("  ".join([f"{row:<18}", *(f"{figures[column]:>12.4g}" for column in columns)]))
    print(f"  ratio              {ratio:.3f}")
    if path is not None:
        Path(path).write_text(
            json.dumps({"name": name, "ratio": ratio, "rows": rows, **facts}, indent=1, allow_nan=False)
        )
