"""A configuration that says no more than it must."""

from rlhf_core.config import parse_config

MINIMAL = {
    "actor": {"model_name_or_path": "builtin:tiny"},
    "data": {"prompt_dataset": "prompts.jsonl"},
    "reward": {"functions": [{"use": "digits"}]},
}


def config(*overrides):
    return parse_config(MINIMAL, overrides)
