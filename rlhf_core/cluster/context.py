"""What every worker process is told when it is made."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from rlhf_core.config import Config, SupervisedConfig
from rlhf_core.data import PinnedModel, resolve_model
from rlhf_core.errors import ConfigError
from rlhf_core.redaction import remember
from rlhf_core.storage import RunStore
from rlhf_core.telemetry import LogFormat, configure_logging

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlhf_core.config import Method
    from rlhf_core.generation.settings import Device

ConfigT_co = TypeVar("ConfigT_co", bound=Config | SupervisedConfig, covariant=True)


@dataclass(frozen=True)
class BaseContext(Generic[ConfigT_co]):
    """Small and picklable; handed to each actor."""

    run_id: str
    config: ConfigT_co
    device: Device
    workdir: str  # of the controller: relative paths of the configuration mean the same everywhere
    model_cache: str  # folder of built-in models, and of checkpoints of other runs
    models: Mapping[str, PinnedModel] = field(default_factory=dict)  # by role, as the controller pinned them
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)  # environment variable -> value
    log_format: LogFormat = "text"

    @property
    def store(self) -> RunStore:
        """The run's log."""
        return open_store(self.config, self.run_id)

    def model(self, role: str) -> str:
        """What this process loads for a role (``data.models_of``): a folder of this machine, or a Hugging Face id.

        The first call may download or make the model.

        Raises:
            ConfigError: the run has no such role, or its model is gone.
        """
        if role not in self.models:
            raise ConfigError(f"run {self.run_id} has no {role} model; it has {', '.join(self.models) or 'none'}")
        return resolve_model(self.models[role], self.model_cache)

    def enter(self, worker: str) -> None:
        """Make this process a worker of the run. Call first in an actor."""
        if Path(self.workdir).is_dir():
            os.chdir(self.workdir)
        use_secrets(self.secrets)
        configure_logging(self.run_id, worker, form=self.log_format)


class WorkerContext(BaseContext[Config]):
    """Of a run by rewards."""


@dataclass(frozen=True)
class SupervisedContext(BaseContext[SupervisedConfig]):
    """Of a run of SFT, reward-model training or DPO."""

    method: Method = "sft"


def use_secrets(secrets: Mapping[str, str]) -> None:
    """Have them in this process's environment, and in no text that it writes for people."""
    os.environ.update(secrets)
    for value in secrets.values():
        remember(value)


def open_store(config: Config | SupervisedConfig, run_id: str) -> RunStore:
    """The log of a run."""
    return RunStore(run_id, config.storage.root, dict(config.storage.options), config.storage.timeout)
