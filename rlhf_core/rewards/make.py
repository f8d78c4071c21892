"""From the configuration to a reward source. No user code is imported in this process, not even to check it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from rlhf_core.errors import ConfigError
from rlhf_core.rewards.bearer import bearer_token
from rlhf_core.rewards.combine import Part, WeightedSum
from rlhf_core.rewards.contract import FunctionSpec
from rlhf_core.rewards.function_source import FunctionSource
from rlhf_core.rewards.functions import default_name
from rlhf_core.rewards.pool import START_TIMEOUT, WorkerPool
from rlhf_core.rewards.process import LostWorkerError, WorkerProcess
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.config.model import RewardConfig
    from rlhf_core.rewards.source import RewardSource

log = get_logger(__name__)

REMOTE = "remote"  # the part of the servers
MODEL = "model"  # the part of the trained reward model


def make_reward_source(config: RewardConfig, model: RewardSource | None = None) -> WeightedSum:
    """The source that a run scores with; processes and connections are made with the first ``score``.

    Args:
        config: of the run. Its functions are a part each, its servers one, its trained model one.
        model: the trained model, exactly where ``reward.model_name_or_path`` names one: who runs it knows how. It is
            closed with the sum.

    Raises:
        ConfigError: what can be seen without loading the functions; ``check_reward_config`` sees the rest.
    """
    if (config.model_name_or_path is None) != (model is None):
        raise ConfigError(f"reward.model_name_or_path={config.model_name_or_path!r}, but the model given is {model!r}")
    parts = _function_parts(config)
    if urls := _urls(config):
        parts.append(Part(REMOTE, config.remote_weight, _http_source(urls, config)))
    if model is not None:
        parts.append(Part(MODEL, config.model_weight, model))
    return WeightedSum(parts)


def check_reward_config(config: RewardConfig) -> None:
    """Load every function once, in a process of its own, and knock at every server.

    Blocks for as long as importing the user's files takes.

    Raises:
        ConfigError: it names each key that cannot work; or no server can be reached. One that is down beside others
            which are not is a warning: its share goes to them.
    """
    check_functions(config)
    check_servers(config)


def check_functions(config: RewardConfig) -> None:
    """Load every function once. ``ConfigError`` names each key that cannot work."""
    specs, _, _ = _read_functions(config)
    if not specs:
        return
    worker = WorkerProcess()
    try:
        worker.load(specs, START_TIMEOUT)
    except LostWorkerError as error:
        raise ConfigError(str(error)) from error
    finally:
        worker.kill()


def check_servers(config: RewardConfig) -> None:
    """Open a connection to every server. ``ConfigError`` if that works with none of them, or the token is missing."""
    urls = _urls(config)
    if not urls:
        return
    from rlhf_core.rewards.http_call import knock, shown

    _token(config)
    with ThreadPoolExecutor(len(urls)) as threads:
        problems = {url: problem for url, problem in zip(urls, threads.map(knock, urls), strict=True) if problem}
    text = "; ".join(f"{shown(url)}: {problem}" for url, problem in problems.items())
    if len(problems) == len(urls):
        raise ConfigError(f"reward.remote_url: no server can be reached ({text}): start them, or correct the URLs")
    if problems:
        log.warning("reward servers that cannot be reached: %s; the others take their share", text)


def _function_parts(config: RewardConfig) -> list[Part]:
    specs, names, weights = _read_functions(config)
    pool = WorkerPool(specs, num_workers=config.num_workers, timeout=config.timeout)
    size, retries = config.batch_size, config.max_retries
    return [
        Part(name, weight, FunctionSource(pool, index, batch_size=size, max_retries=retries))
        for index, (name, weight) in enumerate(zip(names, weights, strict=True))
    ]


def _http_source(urls: Sequence[str], config: RewardConfig) -> RewardSource:
    from rlhf_core.rewards.http_source import HttpSource  # httpx, which the workers must not load

    return HttpSource(
        urls,
        token=_token(config),
        batch_size=config.remote_batch_size,
        concurrency=config.remote_concurrency,
        timeout=config.timeout,
        max_retries=config.max_retries,
    )


def _urls(config: RewardConfig) -> list[str]:
    return [url for url in config.remote_url if "://" in url]


def _token(config: RewardConfig) -> str | None:
    name = config.remote_token_env
    return None if name is None else bearer_token(name, f"reward.remote_token_env={name!r}")


def _read_functions(config: RewardConfig) -> tuple[list[FunctionSpec], list[str], list[float]]:
    """(functions, their names, their weights)."""
    if config.functions:
        specs = [
            FunctionSpec(f"reward.functions[{index}].use", function.use, function.args)
            for index, function in enumerate(config.functions)
        ]
        names = [function.name or default_name(function.use) for function in config.functions]
        weights = [function.weight for function in config.functions]
    else:
        files = [url for url in config.remote_url if "://" not in url]
        specs = [FunctionSpec("reward.remote_url", file) for file in files]
        names = [default_name(file) for file in files]
        weights = [1.0] * len(specs)
    _check(specs, names, config)
    return specs, names, weights


def _check(specs: Sequence[FunctionSpec], names: Sequence[str], config: RewardConfig) -> None:
    servers, model = bool(_urls(config)), config.model_name_or_path is not None
    if not (specs or servers or model):
        raise ConfigError("no reward source: set reward.functions, reward.remote_url or reward.model_name_or_path")
    others = {REMOTE: servers, MODEL: model}
    for index, name in enumerate(names):
        taken_by = f"reward.functions[{names.index(name)}]" if name in names[:index] else f"the reward's part {name!r}"
        if name in names[:index] or others.get(name, False):
            raise ConfigError(
                f"reward.functions[{index}]: the name {name!r} is taken by {taken_by}; set reward.functions[{index}].name"
            )
    for spec in specs:
        try:
            json.dumps(spec.args)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{spec.args_place}: only JSON values reach a reward function: {error}") from error
