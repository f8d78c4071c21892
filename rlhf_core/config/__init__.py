"""The typed, frozen configuration trees. Imports nothing heavy: it loads in milliseconds, in the UI and in tests."""

from rlhf_core.config.chain import ChainConfig
from rlhf_core.config.chain_plan import ChainedRun, plan_chain
from rlhf_core.config.load import (
    apply_overrides,
    kind_of,
    load_chain_config,
    load_config,
    load_retrain_config,
    load_supervised_config,
    parse_chain_config,
    parse_config,
    parse_retrain_config,
    parse_supervised_config,
    read_yaml,
)
from rlhf_core.config.model import Config, RewardFunctionConfig
from rlhf_core.config.retrain import RetrainConfig
from rlhf_core.config.retrain_plan import plan_turn
from rlhf_core.config.supervised import Method, SupervisedConfig

__all__ = [
    "ChainConfig",
    "ChainedRun",
    "Config",
    "Method",
    "RetrainConfig",
    "RewardFunctionConfig",
    "SupervisedConfig",
    "apply_overrides",
    "kind_of",
    "load_chain_config",
    "load_config",
    "load_retrain_config",
    "load_supervised_config",
    "parse_chain_config",
    "parse_config",
    "parse_retrain_config",
    "parse_supervised_config",
    "plan_chain",
    "plan_turn",
    "read_yaml",
]
