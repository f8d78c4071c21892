"""The smallest configuration that is valid."""

import copy
import json

from rlhf_core.config import Config, parse_config
from rlhf_core.config.rules import default_at, value_at

MINIMAL = {
    "actor": {"model_name_or_path": "builtin:tiny"},
    "data": {"prompt_dataset": "prompts.jsonl"},
    "reward": {"functions": [{"use": "digits"}]},
}


def config(*overrides: str) -> Config:
    return parse_config(copy.deepcopy(MINIMAL), overrides)


def another_value(key: str) -> str:
    """A value of the right type that is not the default, as an override."""
    default = default_at(config(), key)
    by_type = {bool: True, int: 7, float: 0.25, str: "other", tuple: [0.1, 0.9], type(None): 5}
    special = {
        "actor.optim": "muon",
        "critic.adam": {"lr": 0.5},
        "ds.lora": {"rank": 8},
        "logger.wandb": {"project": "p"},
        "critic.model_name_or_path": "m",
        "reward.model_name_or_path": "m",
        "train.agent_func_path": "a.py",
        "ckpt.best_metric_key": "eval/reward_mean",
        "logger.tensorboard_dir": "tb",
    }
    return f"{key}={json.dumps(special.get(key, by_type.get(type(default))))}"


__all__ = ["MINIMAL", "another_value", "config", "default_at", "value_at"]
