"""What every worker process is told when it is made."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.storage import RunStore
from rlhf_core.telemetry import configure_logging

if TYPE_CHECKING:
    from rlhf_core.config import Config
    from rlhf_core.generation.settings import Device


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Small and picklable; handed to each actor."""

    run_id: str
    config: Config
    device: Device
    workdir: str  # of the controller: relative paths of the configuration mean the same everywhere
    model_cache: str  # folder of built-in models

    @property
    def store(self) -> RunStore:
        """The run's log."""
        return open_store(self.config, self.run_id)

    def enter(self, worker: str) -> None:
        """Make this process a worker of the run. Call first in an actor."""
        if Path(self.workdir).is_dir():
            os.chdir(self.workdir)
        configure_logging(self.run_id, worker)


def open_store(config: Config, run_id: str) -> RunStore:
    """The log of a run."""
    return RunStore(run_id, config.storage.root, dict(config.storage.options), config.storage.timeout)
