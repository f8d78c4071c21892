"""Timings of a stage."""

from __future__ import annotations

import time


class Stopwatch:
    """When something started, and how long it has run.

    ``started_at`` is wall-clock time (for people and timelines); durations come from the monotonic clock.
    """

    def __init__(self) -> None:
        self.started_at = time.time()
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def stamp(self) -> dict[str, float]:
        """``started_at`` (unix seconds) and ``seconds``, for a manifest."""
        return {"started_at": round(self.started_at, 3), "seconds": round(self.seconds, 4)}


def throughput(count: float, seconds: float) -> float:
    """Things per second; 0 for a duration too short to measure."""
    return count / seconds if seconds > 0 else 0.0
