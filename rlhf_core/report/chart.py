"""Line charts as SVG, small enough for a telephone: no library draws text that scales with neither page nor font.

A chart says in words (``<title>``, ``<desc>``) what it shows. Colours are classes of the page's style sheet. A long series is
thinned to the least and the greatest point of each stretch, so that a spike of one iteration stays visible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, HEIGHT = 360, 190  # units of the drawing; about pixels on a telephone
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 10, 24
MOST_POINTS = 300  # of a line
NOISE = 1e-3  # of the largest value: less is no change that a chart shows
MOST_DOTS = 40  # points that are drawn, and tell their value


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a chart. ``steps`` and ``values`` have the same length, and steps ascend."""

    label: str
    steps: Sequence[int]
    values: Sequence[float]
    spread: Sequence[float] | None = None  # drawn as a band of that much on both sides


def line_chart(title: str, lines: Sequence[Line], step: str = "iteration") -> Markup:
    """A drawing of at least one point.

    Args:
        title: what it shows, in words.
        lines: at most four; others have no colour of their own.
        step: what ``steps`` count.
    """
    thin = [_thinned(_finite(line)) for line in lines]
    lows = [v - s for line in thin for v, s in zip(line.values, line.spread or [0.0] * len(line.values), strict=True)]
    highs = [v + s for line in thin for v, s in zip(line.values, line.spread or [0.0] * len(line.values), strict=True)]
    steps = [s for line in thin for s in line.steps]
    if not steps:
        return Markup("")
    ys = ticks(*_widened(min(lows), max(highs)))
    frame = _Frame(min(steps), max(steps), ys[0], ys[-1])
    parts = [*_axes(frame, ys, step)]
    for index, line in enumerate(thin):
        parts += _line(frame, line, index, step)
    described = escape("; ".join(_in_words(line, step) for line in lines if len(line.values)))
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title><desc>{described}</desc>{''.join(parts)}</svg>"
    )


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers that span ``low`` to ``high``, evenly spaced: 1, 2, 2.5 or 5 times a power of ten apart."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def number(value: float) -> str:
    """A value as people read it: four digits, thousands as k, M, G."""
    if not math.isfinite(value):
        return str(value)
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:.3g}" if 0 < abs(value) < 1e-3 else f"{value:.4g}"


def thinned(values: Sequence[float], most: int = MOST_POINTS) -> list[int]:
    """Which points of a long series are drawn: of each stretch the least and the greatest, and both ends."""
    if len(values) <= most:
        return list(range(len(values)))
    stretches = most // 2
    edges = [round(i * len(values) / stretches) for i in range(stretches + 1)]
    chosen = {0, len(values) - 1}
    for start, end in pairwise(edges):
        stretch = range(start, end)
        chosen |= {min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)}
    return sorted(chosen)


@dataclass(frozen=True, slots=True)
class _Frame:
    """From steps and values to places."""

    first: int
    last: int
    low: float
    high: float

    def x(self, step: float) -> float:
        if self.last == self.first:
            return (LEFT + WIDTH - RIGHT) / 2
        return LEFT + (step - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)


def _axes(frame: _Frame, ys: Sequence[float], step: str) -> list[str]:
    parts = []
    for value in ys:
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{number(value)}</text>')
    shown = {frame.first, frame.last}
    if frame.last - frame.first >= 2:
        shown.add((frame.first + frame.last) // 2)
    for value in sorted(shown):
        anchor = (
            "start" if value == frame.first != frame.last else "end" if value == frame.last != frame.first else "middle"
        )
        label = f"{step} {value}" if value == frame.first else str(value)
        parts.append(
            f'<text class="tick" x="{frame.x(value):.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{label}</text>'
        )
    return parts


def _line(frame: _Frame, line: Line, index: int, step: str) -> list[str]:
    points = [(frame.x(s), frame.y(v)) for s, v in zip(line.steps, line.values, strict=True)]
    parts = []
    if line.spread is not None and len(points) > 1:
        over = [(x, frame.y(v + s)) for (x, _), v, s in zip(points, line.values, line.spread, strict=True)]
        under = [(x, frame.y(v - s)) for (x, _), v, s in zip(points, line.values, line.spread, strict=True)]
        parts.append(f'<polygon class="band c{index}" points="{_places([*over, *reversed(under)])}"/>')
    if len(points) > 1:
        parts.append(f'<polyline class="line c{index}" points="{_places(points)}"/>')
    if len(points) <= MOST_DOTS:
        for (x, y), s, v in zip(points, line.steps, line.values, strict=True):
            told = escape(f"{line.label}, {step} {s}: {number(v)}")
            parts.append(
                f'<circle class="dot c{index}" cx="{x:.1f}" cy="{y:.1f}" r="2.2"><title>{told}</title></circle>'
            )
    return parts


def _places(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _finite(line: Line) -> Line:
    kept = [i for i, value in enumerate(line.values) if math.isfinite(value)]
    return line if len(kept) == len(line.values) else _picked(line, kept)


def _thinned(line: Line) -> Line:
    return _picked(line, thinned(line.values))


def _picked(line: Line, chosen: Sequence[int]) -> Line:
    spread = None if line.spread is None else [line.spread[i] for i in chosen]
    return Line(line.label, [line.steps[i] for i in chosen], [line.values[i] for i in chosen], spread)


def _widened(low: float, high: float) -> tuple[float, float]:
    """A range of which four digits show something: noise in the last bits is drawn as the flat line that it is."""
    largest = max(abs(low), abs(high))
    if high - low > NOISE * largest:
        return low, high
    pad = 2 * NOISE * largest or 1.0
    return low - pad, high + pad


def _in_words(line: Line, step: str) -> str:
    finite = [value for value in line.values if math.isfinite(value)]
    if not finite:
        return f"{line.label}: no finite value"
    return (
        f"{line.label}: {number(finite[0])} at {step} {line.steps[0]}, {number(finite[-1])} at {step} {line.steps[-1]}, "
        f"from {number(min(finite))} to {number(max(finite))}"
    )
