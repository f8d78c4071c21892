"""The smallest configuration that is valid."""

import copy

from rlhf_core.config import Config, parse_config

MINIMAL = {
    "actor": {"model_name_or_path": "builtin:tiny"},
    "data": {"prompt_dataset": "prompts.jsonl"},
    "reward": {"functions": [{"use": "digits"}]},
}


def config(*overrides: str) -> Config:
    return parse_config(copy.deepcopy(MINIMAL), overrides)


__all__ = ["MINIMAL", "config"]
