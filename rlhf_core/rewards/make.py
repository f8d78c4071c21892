"""From the configuration to a reward source. No user code is imported in this process, not even to check it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rlhf_core.errors import ConfigError
from rlhf_core.rewards.combine import Part, WeightedSum
from rlhf_core.rewards.contract import FunctionSpec
from rlhf_core.rewards.function_source import FunctionSource
from rlhf_core.rewards.functions import default_name
from rlhf_core.rewards.pool import START_TIMEOUT, WorkerPool
from rlhf_core.rewards.process import LostWorkerError, WorkerProcess

if TYPE_CHECKING:
    from rlhf_core.config.model import RewardConfig
    from rlhf_core.rewards.source import RewardSource


def make_reward_source(config: RewardConfig) -> RewardSource:
    """The source that a run scores with; its processes start with the first ``score``.

    ``ConfigError`` for what can be seen without loading the functions; ``check_reward_config`` sees the rest.
    """
    specs, names, weights = _read(config)
    pool = WorkerPool(specs, num_workers=config.num_workers, timeout=config.timeout)
    return WeightedSum(
        [
            Part(
                name,
                weight,
                FunctionSource(pool, index, batch_size=config.batch_size, max_retries=config.max_retries),
            )
            for index, (name, weight) in enumerate(zip(names, weights, strict=True))
        ]
    )


def check_reward_config(config: RewardConfig) -> None:
    """Load every function once, in a process of its own. ``ConfigError`` names each key that cannot work.

    Blocks for as long as importing the user's files takes.
    """
    specs, _, _ = _read(config)
    worker = WorkerProcess()
    try:
        worker.load(specs, START_TIMEOUT)
    except LostWorkerError as error:
        raise ConfigError(str(error)) from error
    finally:
        worker.kill()


def _read(config: RewardConfig) -> tuple[list[FunctionSpec], list[str], list[float]]:
    """(functions, their names, their weights)."""
    if config.model_name_or_path is not None or any("://" in url for url in config.remote_url):
        raise ConfigError(
            "reward.model_name_or_path and URLs in reward.remote_url are not available in this version: name a .py file"
        )
    if config.functions:
        specs = [
            FunctionSpec(f"reward.functions[{index}].use", function.use, function.args)
            for index, function in enumerate(config.functions)
        ]
        names = [function.name or default_name(function.use) for function in config.functions]
        weights = [function.weight for function in config.functions]
    else:
        specs = [FunctionSpec("reward.remote_url", url) for url in config.remote_url]
        names = [default_name(url) for url in config.remote_url]
        weights = [1.0] * len(specs)
    _check(specs, names)
    return specs, names, weights


def _check(specs: list[FunctionSpec], names: list[str]) -> None:
    if not specs:
        raise ConfigError("no reward source: set reward.functions or reward.remote_url")
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(
                f"reward.functions[{index}]: the name {name!r} is taken by reward.functions[{names.index(name)}]; "
                f"set reward.functions[{index}].name"
            )
    for spec in specs:
        try:
            json.dumps(spec.args)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{spec.args_place}: only JSON values reach a reward function: {error}") from error
