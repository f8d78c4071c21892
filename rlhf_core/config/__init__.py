"""The typed, frozen configuration trees. Imports nothing heavy: it loads in milliseconds, in the UI and in tests."""

from rlhf_core.config.chain import ChainConfig
from rlhf_core.config.chain_plan import ChainedRun, plan_chain
from rlhf_core.config.load import (
    apply_overrides,
    kind_of,
    load_chain_config,
    load_config,
    load_supervised_config,
    parse_chain_config,
    parse_config,
    parse_supervised_config,
    read_yaml,
)
from rlhf_core.config.model import Config, RewardFunctionConfig
from rlhf_core.config.supervised import Method, SupervisedConfig

__all__ = [
    "ChainConfig",
    "ChainedRun",
    "Config",
    "Method",
    "RewardFunctionConfig",
    "SupervisedConfig",
    "apply_overrides",
    "kind_of",
    "load_chain_config",
    "load_config",
    "load_supervised_config",
    "parse_chain_config",
    "parse_config",
    "parse_supervised_config",
    "plan_chain",
    "read_yaml",
]
