"""How a configuration names a model that a run of this project made.

::

    run:ID                          newest complete checkpoint of a run below storage.root; also run:ID@latest
    run:ID@best                     its best one (ckpt.best_metric_key of that run)
    run:ID@12                       the one of policy version 12
    run:s3://bucket/path/ID@best    of a run that lies anywhere
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from rlhf_core.errors import ConfigError

PREFIX = "run:"
# Folders of a checkpoint with models in the Hugging Face format.
EXPORT = "hf"  # what such a name means
AVERAGE_EXPORT = "hf_ema"
ADAPTER_EXPORT = "adapter"  # what was trained only, in PEFT's form
_SPEC = re.compile(
    r"run:((?P<root>[a-z][a-z0-9+.-]*://.+)/)?(?P<run_id>[A-Za-z0-9._-]{1,128})(@(?P<which>best|latest|\d+))?"
)


@dataclass(frozen=True, slots=True)
class RunModel:
    """A parsed ``run:`` name."""

    spec: str
    root: str | None  # where the run lies; None: below storage.root
    run_id: str
    which: int | Literal["best", "latest"]  # a policy version, or the rule that picks one


def is_run_model(spec: str) -> bool:
    """True if the name is of a run's model, well-formed or not."""
    return spec.startswith(PREFIX)


def parse_run_model(spec: str) -> RunModel:
    """The parts of a ``run:`` name.

    Raises:
        ConfigError: it is none. A URL with a credential in it is refused and not repeated.
    """
    if "@" in urlsplit(spec.removeprefix(PREFIX)).netloc:
        raise ConfigError(
            "a run: model has a URL with a user or password in it, and the configuration is stored and shown: remove them, "
            "and use the environment"
        )
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise ConfigError(
            f"{spec!r} names no run's model: write run:ID, run:ID@best, run:ID@latest or run:ID@12 (a policy version), "
            "where ID is a run below storage.root or the URL of a run, such as s3://bucket/runs/ID"
        )
    which = match["which"] or "latest"
    return RunModel(spec, match["root"], match["run_id"], int(which) if which.isdecimal() else _rule(which))


def _rule(which: str) -> Literal["best", "latest"]:
    return "best" if which == "best" else "latest"
