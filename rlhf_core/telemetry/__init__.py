"""Logs and timings. Metrics themselves are plain ``dict[str, float]`` with ``section/name`` keys."""

from rlhf_core.telemetry.json_lines import LogFormat, log_format, say_in_json
from rlhf_core.telemetry.logs import configure_logging, get_logger, redact_logs
from rlhf_core.telemetry.place import Place, at, here, in_stage
from rlhf_core.telemetry.timing import Stopwatch, throughput

__all__ = [
    "LogFormat",
    "Place",
    "Stopwatch",
    "at",
    "configure_logging",
    "get_logger",
    "here",
    "in_stage",
    "log_format",
    "redact_logs",
    "say_in_json",
    "throughput",
]
