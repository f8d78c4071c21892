"""The typed, frozen configuration tree. Imports nothing heavy: it loads in milliseconds, in the UI and in tests."""

from rlhf_core.config.load import apply_overrides, load_config, parse_config, read_yaml
from rlhf_core.config.model import Config, RewardFunctionConfig

__all__ = ["Config", "RewardFunctionConfig", "apply_overrides", "load_config", "parse_config", "read_yaml"]
