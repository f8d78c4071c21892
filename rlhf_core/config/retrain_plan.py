"""From a retraining to the configuration of a turn: what is trained, from where, and on which prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.config.load import apply_overrides, parse_config, read_yaml
from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlhf_core.config.model import Config
    from rlhf_core.config.retrain import RetrainConfig


def plan_turn(retraining: RetrainConfig, start: str | None = None, rows: str | None = None) -> Config:
    """The configuration of a turn's run.

    Args:
        retraining: checked.
        start: the model it starts from; default: that of the training configuration.
        rows: URL of the list of its prompts; default: all there are.

    Raises:
        ConfigError: it cannot be trained, or nothing could be compared or promoted afterwards; each problem with its remedy.
    """
    data = read_yaml(retraining.config) if isinstance(retraining.config, str) else retraining.config
    source = retraining.config if isinstance(retraining.config, str) else "config"
    config = parse_config(apply_overrides(data, retraining.overrides), source=source)
    problems = list(_problems(config))
    if problems:
        raise ConfigError("\n".join(f"{source}: {problem}" for problem in problems))
    # Through the schema again: the start and the registry are keys like all others, with their rules.
    tree = config.model_dump(mode="json")
    tree["logger"]["mlflow_model"] = retraining.model
    tree["data"]["only_rows"] = rows
    if start is not None:
        tree["actor"]["model_name_or_path"] = start
    return parse_config(tree, source=source)


def _problems(config: Config) -> Iterator[str]:
    if not config.eval.dataset:
        yield "eval.dataset=[]: champion and challenger are compared on held-out prompts: name them"
    if not config.ckpt.save_hf:
        yield "ckpt.save_hf=false: a champion is a model that can be loaded: set it to true"
    if config.data.only_rows is not None:
        yield f"data.only_rows={config.data.only_rows!r} is set by each turn, to its new prompts: remove it"
    if config.logger.mlflow_model is not None:
        yield f"logger.mlflow_model={config.logger.mlflow_model!r} is set by each turn, to registered_model: remove it"
