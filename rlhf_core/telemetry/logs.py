"""Logging of the worker processes: one line an event, with the run and the worker in it."""

from __future__ import annotations

import logging
import sys

from rlhf_core.redaction import redact
from rlhf_core.telemetry.json_lines import JsonLines, LogFormat

ROOT = "rlhf"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module, below this project's root logger."""
    return logging.getLogger(f"{ROOT}.{name.removeprefix('rlhf_core.')}")


def configure_logging(run_id: str, worker: str, level: int = logging.INFO, form: LogFormat = "text") -> None:
    """Send this process's log lines to stderr, which Ray forwards. Call once per worker process."""
    handler = logging.StreamHandler(sys.stderr)
    line = f"%(asctime)s %(levelname)s run={run_id} worker={worker} %(name)s: %(message)s"
    handler.setFormatter(JsonLines(worker, run_id) if form == "json" else logging.Formatter(line))
    logger = logging.getLogger(ROOT)
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
    redact_logs()


def redact_logs() -> None:
    """Mask secrets in every log line of this process, whoever writes it, wherever it goes. A second call does nothing."""
    logging.setLogRecordFactory(RedactedRecord)


class RedactedRecord(logging.LogRecord):
    """A log line whose message and traceback hold no secret."""

    _traceback: str | None = None

    def getMessage(self) -> str:
        """See logging's."""
        return redact(super().getMessage())

    @property
    def exc_text(self) -> str | None:  # an attribute of logging's, set by its formatters
        """The traceback, once it was formatted."""
        return self._traceback

    @exc_text.setter
    def exc_text(self, text: str | None) -> None:
        self._traceback = None if text is None else redact(text)
