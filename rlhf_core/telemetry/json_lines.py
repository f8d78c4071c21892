"""Log lines as JSON objects, one a line, for whoever collects the logs of many runs.

::

    {"time": "2026-01-31T12:00:00.123+00:00", "level": "WARNING", "run_id": "first", "worker": "policy-0", "stage": "update",
     "iteration": 12, "policy_version": null, "logger": "rlhf.cluster.rank_group", "message": "…", "exception": "Traceback …"}

``worker`` is ``controller`` in the process of the flow. What is not known is null; ``exception`` is there only with one.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Literal, TypeAlias

from rlhf_core.telemetry.place import here

LogFormat: TypeAlias = Literal["text", "json"]
VARIABLE = "RLHF_LOG_FORMAT"


def log_format(chosen: LogFormat | None) -> LogFormat:
    """What a configuration says (``logger.log_format``), else the environment."""
    return chosen or ("json" if os.environ.get(VARIABLE) == "json" else "text")


class JsonLines(logging.Formatter):
    """A record as one line.

    Args:
        worker: name of this process in its run.
        run_id: of the process; without one that of the place.
    """

    def __init__(self, worker: str, run_id: str | None = None) -> None:
        super().__init__()
        self._worker = worker
        self._run_id = run_id

    def format(self, record: logging.LogRecord) -> str:
        """See logging's."""
        place = asdict(here())
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            **place,
            "run_id": self._run_id or place["run_id"],
            "worker": self._worker,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            record.exc_text = self.formatException(record.exc_info)
            line["exception"] = record.exc_text
        return json.dumps(line, ensure_ascii=False)


def say_in_json() -> None:
    """Have this process, that of a flow, write its own log lines and Prefect's as JSON to stderr. May be called again.

    Handlers that send them elsewhere, such as to Prefect's server, stay as they are.
    """
    for name in (None, "prefect", "prefect.extra", "rlhf"):
        logger = logging.getLogger(name)
        for handler in [handler for handler in logger.handlers if _writes_to_terminal(handler)]:
            logger.removeHandler(handler)
            said = logging.StreamHandler(sys.stderr)
            said.setLevel(handler.level)
            said.setFormatter(JsonLines("controller"))
            logger.addHandler(said)


def _writes_to_terminal(handler: logging.Handler) -> bool:
    """Prefect's own has a ``console``."""
    standard = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return hasattr(handler, "console") or (isinstance(handler, logging.StreamHandler) and handler.stream in standard)
