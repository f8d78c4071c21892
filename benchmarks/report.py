"""What every benchmark does with its figures."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any


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
        Path(path).write_text(json.dumps(body, indent=1))
