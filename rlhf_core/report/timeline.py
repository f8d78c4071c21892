"""When each stage was at work: the whole run by stage, and its newest iterations one a row, so that overlaps show.

::

    by stage    rollout ▇▇▇▇ ▇▇▇▇ ▇▇▇▇        newest    12  ▇▇rollout▇▇ ▇update▇
                update      ▇▇▇  ▇▇▇                    13          ▇▇rollout▇▇ ▇update▇

Time in which nothing was done, such as between two attempts, is cut out and marked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from rlhf_core.report.run_log import STAGES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rlhf_core.report.run_log import Span

WIDTH = 960
LEFT, RIGHT = 86, 8
ROW, BAR = 24, 16
NEWEST = 10  # iterations, one a row
LEAST_PAUSE = 30.0  # seconds without work that are cut out, and at least
PAUSE_SHARE = 0.05  # of the time with work
PAUSE_WIDTH, ALL_PAUSES = 0.02, 0.2  # of the drawing, for a pause, and for all of them at most

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class StageTime:
    """What one stage took."""

    stage: str
    times: int
    seconds: float
    share: float  # of the time in which anything was at work
    longest: float
    longest_of: int  # iteration or version


@dataclass(frozen=True, slots=True)
class Timeline:
    """Drawings and their table."""

    whole: Markup
    newest: Markup
    table: tuple[StageTime, ...]
    working: float  # seconds in which anything was at work
    overlap: float  # share of them in which rollout and update were at work at once


def timeline_of(spans: Sequence[Span]) -> Timeline | None:
    """None where there is no span at all."""
    if not spans:
        return None
    busy = merged((span.start, span.end) for span in spans)
    working = _length(busy)
    by_stage = {stage: [span for span in spans if span.stage == stage] for stage in STAGES}
    table = []
    for stage, found in by_stage.items():
        if found:
            longest = max(found, key=lambda span: span.end - span.start)
            seconds = sum(span.end - span.start for span in found)
            share = _length(merged((s.start, s.end) for s in found)) / working if working else 0.0
            table.append(StageTime(stage, len(found), seconds, share, longest.end - longest.start, longest.iteration))
    both = overlap(*(merged((s.start, s.end) for s in by_stage[stage]) for stage in ("rollout", "update")))
    return Timeline(_whole(by_stage, busy), _newest(spans), tuple(table), working, both / working if working else 0.0)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union, as intervals that neither touch nor overlap, ascending."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Seconds that are in both; each as ``merged`` gives it."""
    seconds, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        seconds += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return seconds


class Clock:
    """From time to place, with long pauses cut out. ``busy``: as ``merged`` gives it."""

    def __init__(self, busy: Sequence[Interval]) -> None:
        least = max(LEAST_PAUSE, PAUSE_SHARE * _length(busy))
        self.stretches: list[Interval] = []  # without a long pause inside
        for start, end in busy:
            if self.stretches and start - self.stretches[-1][1] < least:
                self.stretches[-1] = (self.stretches[-1][0], end)
            else:
                self.stretches.append((start, end))
        pauses, wide = len(self.stretches) - 1, WIDTH - LEFT - RIGHT
        self._pause = wide * min(PAUSE_WIDTH, ALL_PAUSES / pauses) if pauses else 0.0
        room = wide - self._pause * pauses
        self._scale = max(room, 1.0) / (_length(self.stretches) or 1.0)

    def x(self, at: float) -> float:
        """Where an instant of a stretch lies."""
        x = float(LEFT)
        for start, end in self.stretches:
            if at <= end:
                return x + max(at - start, 0.0) * self._scale
            x += (end - start) * self._scale + self._pause
        return WIDTH - RIGHT

    def pauses(self) -> list[tuple[float, float]]:
        """(where, how many seconds were cut out)."""
        pairs = zip(self.stretches, self.stretches[1:], strict=False)
        return [(self.x(left[1]) + self._pause / 2, right[0] - left[1]) for left, right in pairs]


def duration(seconds: float) -> str:
    """As people say it."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, left = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {left:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _whole(by_stage: dict[str, list[Span]], busy: Sequence[Interval]) -> Markup:
    """One row a stage; what lies within the same unit of the drawing is one bar."""
    clock = Clock(busy)
    rows = [(stage, spans) for stage, spans in by_stage.items() if spans]
    parts = []
    for row, (stage, spans) in enumerate(rows):
        parts.append(_label(row, stage))
        places = merged((clock.x(s.start), max(clock.x(s.end), clock.x(s.start) + 0.6)) for s in spans)
        parts += [_bar(row, start, end, stage) for start, end in places]
    return _drawing("Timeline of the whole run, by stage", len(rows), parts, clock)


def _newest(spans: Sequence[Span]) -> Markup:
    """One row an iteration, a colour a stage. What is done with a version belongs to the iteration that made it."""
    owned = [(span.iteration - (span.stage in ("evaluate", "checkpoint")), span) for span in spans]
    shown = sorted({owner for owner, _ in owned})[-NEWEST:]
    chosen = [(owner, span) for owner, span in owned if owner in shown]
    clock = Clock(merged((span.start, span.end) for _, span in chosen))
    parts = [_label(row, f"iteration {owner}" if owner >= 0 else "before") for row, owner in enumerate(shown)]
    for owner, span in chosen:
        told = f"{span.stage} of iteration {owner}: {duration(span.end - span.start)}"
        parts.append(_bar(shown.index(owner), clock.x(span.start), clock.x(span.end), span.stage, told))
    return _drawing("Timeline of the newest iterations", len(shown), parts, clock)


def _drawing(title: str, rows: int, parts: list[str], clock: Clock) -> Markup:
    height = rows * ROW + 24
    origin = clock.stretches[0][0]
    marks = []
    for x, seconds in clock.pauses()[:40]:
        told = escape(f"nothing was at work for {duration(seconds)}")
        marks.append(
            f'<line class="pause" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{rows * ROW}"><title>{told}</title></line>'
        )
    ends = [(LEFT, "start", "0 s"), (WIDTH - RIGHT, "end", duration(clock.stretches[-1][1] - origin))]
    for x, anchor, text in ends:
        marks.append(f'<text class="tick" x="{x}" y="{height - 6}" text-anchor="{anchor}">{text}</text>')
    return Markup(
        f'<svg class="gantt" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}{''.join(marks)}</svg>"
    )


def _label(row: int, text: str) -> str:
    y = row * ROW
    return (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y + ROW}" y2="{y + ROW}"/>'
        f'<text class="lane" x="{LEFT - 8}" y="{y + ROW / 2 + 4}" text-anchor="end">{escape(text)}</text>'
    )


def _bar(row: int, start: float, end: float, stage: str, told: str = "") -> str:
    title = f"<title>{escape(told)}</title>" if told else ""
    y, wide = row * ROW + (ROW - BAR) / 2, max(end - start, 0.6)
    return f'<rect class="st-{stage}" x="{start:.1f}" y="{y}" width="{wide:.1f}" height="{BAR}">{title}</rect>'


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
