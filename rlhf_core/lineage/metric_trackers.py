"""Which trackers of metrics a configuration asks for."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from rlhf_core.config.model import LoggerConfig
    from rlhf_core.lineage.tracker import Tracker


def make_metric_trackers(logger: LoggerConfig) -> list[Tracker]:
    """TensorBoard and Weights & Biases, as far as they are wanted.

    Raises:
        ConfigError: a package of theirs is not installed.
    """
    trackers: list[Tracker] = []
    if logger.tensorboard_dir is not None:
        _require("tensorboard", f"logger.tensorboard_dir={logger.tensorboard_dir!r}")
        from rlhf_core.lineage.tensorboard import TensorBoardTracker

        trackers.append(TensorBoardTracker(logger.tensorboard_dir))
    if logger.wandb.project is not None:
        _require("wandb", f"logger.wandb.project={logger.wandb.project!r}")
        from rlhf_core.lineage.wandb.tracker import WandbTracker

        home = os.environ.get("WANDB_DIR") or os.environ.get("RLHF_HOME", ".rlhf")
        trackers.append(WandbTracker(logger.wandb, Path(home).absolute()))
    return trackers


def _require(package: str, key: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(f"{key} needs the package {package}: pip install 'rlhf-flow[{package}]'")
