"""A graph as a file: what goes in on the left, what came out on the right. No display is needed.

``.dot`` is text for Graphviz; ``.svg`` and ``.png`` are drawn here.
"""

from __future__ import annotations

from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import ConfigError
from rlhf_core.lineage.graph import COLOURS, dot, graph_of

if TYPE_CHECKING:
    from pathlib import Path

    from rlhf_core.lineage.account import Account
    from rlhf_core.lineage.graph import Box, Graph

FORMATS = (".dot", ".png", ".svg")
FONT = {"family": "monospace", "size": 8.0}
CHARACTER = 0.068  # inches of one, in that font
LINE = 0.16  # inches from one line to the next
GAP_X, GAP_Y = 1.5, 0.35  # inches between columns, where the labels are, and between boxes
PADDING = 0.12
MAX_INCHES = 200.0  # of either side: what viewers still open
DOTS_PER_INCH = 120


def draw_graph(account: Account, path: Path) -> None:
    """Write a picture.

    Args:
        account: what it shows.
        path: its end says the format.

    Raises:
        ConfigError: see ``check_picture``.
    """
    check_picture(path)
    graph = graph_of(account)
    if path.suffix == ".dot":
        path.write_text(dot(graph), encoding="utf-8")
        return
    _draw(graph, path)


def check_picture(path: Path) -> None:
    """Refuse what cannot be written, before the logs are read.

    Raises:
        ConfigError: another format, or no such folder.
    """
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path}: no picture of this kind can be drawn: let its name end in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}: make it")


def _draw(graph: Graph, path: Path) -> None:
    from matplotlib.figure import Figure  # takes a second

    places, width, height = layout(graph)
    scale = min(1.0, MAX_INCHES / max(width, height))
    figure = Figure(figsize=(width * scale, height * scale), dpi=DOTS_PER_INCH)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    for (source, target), label in graph.arrows.items():
        _draw_arrow(axes, places[source], box_size(graph.boxes[source]), places[target], label)
    for key, box in graph.boxes.items():
        _draw_box(axes, places[key], box)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})


def layout(graph: Graph) -> tuple[dict[str, tuple[float, float]], float, float]:
    """Where everything is drawn.

    Returns:
        (left edge and middle of every box, the latter counted from below; width and height of the picture); inches.
    """
    columns = _columns(graph)
    height = max(sum(box_size(graph.boxes[key])[1] + GAP_Y for key in column) for column in columns) + GAP_Y
    places: dict[str, tuple[float, float]] = {}
    left = GAP_Y
    for column in columns:
        used = sum(box_size(graph.boxes[key])[1] + GAP_Y for key in column) - GAP_Y
        top = (height + used) / 2
        for key in column:
            tall = box_size(graph.boxes[key])[1]
            places[key] = (left, top - tall / 2)
            top -= tall + GAP_Y
        left += max(box_size(graph.boxes[key])[0] for key in column) + GAP_X
    return places, left - GAP_X + GAP_Y, height


def _columns(graph: Graph) -> list[list[str]]:
    """Every box as far right as what it is used for allows, so that arrows are short."""
    order = TopologicalSorter[str](dict.fromkeys(graph.boxes, ()))
    for source, target in graph.arrows:
        order.add(source, target)
    order.prepare()
    columns: list[list[str]] = []
    while order.is_active():
        ready = order.get_ready()
        columns.insert(0, sorted(ready, key=list(graph.boxes).index))
        order.done(*ready)
    return columns


def box_size(box: Box) -> tuple[float, float]:
    """Width and height of a box, inches."""
    return (max(map(len, box.lines)) * CHARACTER + 2 * PADDING, len(box.lines) * LINE + 2 * PADDING)


def _draw_box(axes: Any, place: tuple[float, float], box: Box) -> None:
    from matplotlib.patches import FancyBboxPatch

    (left, middle), (wide, tall) = place, box_size(box)
    style = "round,pad=0,rounding_size=0.08"
    patch = FancyBboxPatch(
        (left, middle - tall / 2), wide, tall, style, facecolor=COLOURS[box.shape], edgecolor="#374151"
    )
    axes.add_patch(patch)
    for number, line in enumerate(box.lines):
        down = (number - (len(box.lines) - 1) / 2) * LINE
        bold = {"weight": "bold"} if number == 0 else {}
        # A $ of a name is no formula.
        axes.text(left + PADDING, middle - down, line, va="center", parse_math=False, **FONT, **bold)


def _draw_arrow(
    axes: Any, source: tuple[float, float], size: tuple[float, float], target: tuple[float, float], label: str
) -> None:
    start, end = (source[0] + size[0], source[1]), target
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#6b7280", "shrinkA": 0, "shrinkB": 0})
    middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
    shown = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    if label:
        axes.text(*middle, label, ha="center", va="center", parse_math=False, color="#374151", bbox=shown, **FONT)
