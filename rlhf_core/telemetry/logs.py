"""Logging of the worker processes: one line an event, with the run and the worker in it."""

from __future__ import annotations

import logging
import sys

ROOT = "rlhf"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module, below this project's root logger."""
    return logging.getLogger(f"{ROOT}.{name.removeprefix('rlhf_core.')}")


def configure_logging(run_id: str, worker: str, level: int = logging.INFO) -> None:
    """Send this process's log lines to stderr, which Ray forwards. Call once per worker process."""
    handler = logging.StreamHandler(sys.stderr)
    line = f"%(asctime)s %(levelname)s run={run_id} worker={worker} %(name)s: %(message)s"
    handler.setFormatter(logging.Formatter(line))
    logger = logging.getLogger(ROOT)
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
