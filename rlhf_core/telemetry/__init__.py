"""Logs and timings. Metrics themselves are plain ``dict[str, float]`` with ``section/name`` keys."""

from rlhf_core.telemetry.logs import configure_logging, get_logger
from rlhf_core.telemetry.timing import Stopwatch, throughput

__all__ = ["Stopwatch", "configure_logging", "get_logger", "throughput"]
