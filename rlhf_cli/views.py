"""Tables for people, and the same as JSON."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console

BLOCKS = "▁▂▃▄▅▆▇█"
MAX_POINTS = 60  # columns of a plot that fit a terminal of 80 beside its labels


def show_trajectories(out: Console, table: Any, as_json: bool) -> None:
    """Print samples: an Arrow table with some of the columns of trajectories, a row each."""
    rows = _rows(table)
    if as_json:
        _print_json(out, rows)
        return
    if not rows:
        out.print("no trajectory matches")
        return
    for row in rows:
        head = "  ".join(f"{name}={_short(value)}" for name, value in row.items() if name not in ("prompt", "answer"))
        out.print(printable(head), style="dim", markup=False, soft_wrap=True)
        for sign, name in ((">", "prompt"), ("<", "answer")):
            if name in row:
                out.print(f"  {sign} {printable(row[name])}", markup=False, soft_wrap=True)


def show_table(out: Console, table: Any, as_json: bool) -> None:
    """Print an Arrow table of any columns."""
    rows = _rows(table)
    if as_json:
        _print_json(out, rows)
        return
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in table.column_names:
        number = any(isinstance(row[name], int | float) for row in rows)
        shown.add_column(Text(printable(name)), justify="right" if number else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(Text("" if value is None else printable(_short(value))) for value in row.values()))
    out.print(shown)


def _rows(table: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts="strict")
    return rows


def _print_json(out: Console, rows: list[dict[str, Any]]) -> None:
    out.print_json(json.dumps(rows, default=str, ensure_ascii=False))


def show_chain(out: Console, result: dict[str, Any]) -> None:
    """Print what the flow ``chain`` returned: a line for each metric of a stage, and where the last model comes from."""
    table = Table(title=f"chain {result['chain_id']}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("stage", "run", "iterations", "steps", "metric", "first", "last"):
        number = name in ("iterations", "steps", "first", "last")
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for stage in result["stages"]:
        cells = [stage["stage"], stage["run_id"], str(stage["version"]), str(stage["optimizer_steps"])]
        for headline in stage["headlines"] or ({"metric": ""},):
            numbers = [_short(headline[name]) for name in ("first", "last") if name in headline]
            table.add_row(*cells, headline["metric"], *numbers)
            cells = [""] * len(cells)
    out.print(table)
    out.print("\nWhere the last model comes from:")
    for line in result["lineage"]:
        out.print(line, markup=False, soft_wrap=True)


def samples_table(title: str, rows: list[dict[str, Any]]) -> Table:
    """Prompts with answers."""
    table = Table(title=title, show_lines=False, title_justify="left")
    for name in ("prompt", "answer", "reward"):
        table.add_column(name, overflow="fold")
    for row in rows:
        # Text: a model's "[/b]" is no markup of ours.
        table.add_row(Text(printable(row["prompt"])), Text(printable(row["answer"])), _short(row["reward"]))
    return table


def curve(values: list[float], height: int = 8) -> list[str]:
    """A plot of a series as text, ``height`` lines and an axis; a long series is drawn as the means of its stretches."""
    if not values:
        return []
    points = _at_most(values, MAX_POINTS)
    width = 2 if len(points) <= MAX_POINTS // 2 else 1
    low, high = min(points), max(points)
    span = (high - low) or 1.0
    levels = [round((value - low) / span * (height * 8 - 1)) + 1 for value in points]
    lines = []
    for line in reversed(range(height)):
        cells = "".join(_block(level - line * 8) * width for level in levels)
        label = high if line == height - 1 else low if line == 0 else None
        lines.append(f"{'' if label is None else f'{label:.3f}':>8} │{cells}")
    columns = width * len(points)
    lines.append(f"{'':>8} └{'─' * columns}")
    last = f"{len(values) - 1:>{columns - 2}}" if len(values) > 1 else ""
    lines.append(f"{'':>10}0{last}  iteration")
    return lines


def _at_most(values: list[float], count: int) -> list[float]:
    if len(values) <= count:
        return values
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def printable(text: str) -> str:
    """Text as one line, with what a terminal cannot show replaced."""
    return "".join(c if c.isprintable() else "·" for c in text.replace("\n", "⏎"))


def _block(eighths: int) -> str:
    if eighths <= 0:
        return " "
    return BLOCKS[min(eighths, 8) - 1]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
