"""The matrix as people read it, and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from matrix_cells import MODES, PIPELINES

from rlhf_core.config.rules import ESTIMATORS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from matrix_laws import Measured


@dataclass(frozen=True)
class Result:
    """What became of a cell."""

    failed: str = ""  # why
    seconds: float = 0.0
    measured: Measured | None = None

    def __str__(self) -> str:
        if self.failed:
            return f"FAILED: {self.failed[:40]}"
        assert self.measured is not None, "it ran"
        found = self.measured
        told = [f"ok {self.seconds:.0f} s", f"lag {found.max_lag}"]
        counts = {
            "overlaps": found.overlaps,
            "mixed": found.mixed_rows,
            "unfinished": found.unfinished,
            "filtered": found.filtered,
        }
        told += [f"{name} {count}" for name, count in counts.items() if count]
        return ", ".join(told)


def table(results: Mapping[str, Result]) -> list[str]:
    """Markdown: a row for each algorithm and mode, a column for each pipeline."""
    rows = [["algorithm", "mode", *PIPELINES]]
    for estimator, mode in product(ESTIMATORS, MODES):
        cells = [str(results.get(f"{estimator}-{mode}-{pipeline}", "")) for pipeline in PIPELINES]
        if any(cells):
            rows.append([estimator, mode, *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return [f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |" for row in rows]


def write(results: Mapping[str, Result], folder: Path) -> None:
    """``matrix.md`` and ``matrix.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    body: dict[str, Any] = {name: asdict(result) for name, result in results.items()}
    (folder / "matrix.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    (folder / "matrix.md").write_text("\n".join(table(results)) + "\n", encoding="utf-8")
