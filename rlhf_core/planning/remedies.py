"""Keys to change where a run does not fit: each is tried on the whole estimate, and only what helps is named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_core.config import Config, SupervisedConfig, parse_config, parse_supervised_config
from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rlhf_core.planning.fit import Footprint

LEAST_GAIN = 0.02  # of the excess: less is no remedy
MOST_TOGETHER = 6  # changes that are combined


@dataclass(frozen=True, slots=True)
class Remedy:
    """Overrides that bring the run nearer to fitting."""

    overrides: tuple[str, ...]
    saved: float  # bytes, where the most are missing
    fits: bool  # with them alone


def remedies(
    config: Config | SupervisedConfig, now: Footprint, again: Callable[[Config | SupervisedConfig], Footprint]
) -> list[Remedy]:
    """What helps, the most helpful first; the last one combines as many as it takes, where none is enough.

    Args:
        config: that does not fit.
        now: its footprint.
        again: makes the footprint of another configuration; ``ConfigError`` where the cluster has no room for it.
    """
    found = []
    for overrides in _candidates(config, now):
        remedy = _tried(config, now, overrides, again)
        if remedy is not None:
            found.append(remedy)
    found = _mildest(found)
    found.sort(key=lambda remedy: (not remedy.fits, -remedy.saved))
    if not found or found[0].fits:
        return found
    together: tuple[str, ...] = ()
    for single in found[:MOST_TOGETHER]:
        keys = {override.partition("=")[0] for override in together}
        if any(override.partition("=")[0] in keys for override in single.overrides):
            continue
        together += single.overrides
        combined = _tried(config, now, together, again)
        if combined is not None and combined.fits:
            return [*found, combined]
    return found


def excess(footprint: Footprint) -> float:
    """Bytes that are missing, over all kinds of places."""
    return sum(max(0.0, place.peak - place.capacity) for place in footprint.places if place.capacity is not None)


def with_overrides(config: Config | SupervisedConfig, overrides: tuple[str, ...]) -> Config | SupervisedConfig:
    """The same configuration, changed.

    Raises:
        ConfigError: that cannot be.
    """
    tree = config.model_dump(mode="json")
    if isinstance(config, Config):
        return parse_config(tree, list(overrides))
    return parse_supervised_config(tree, list(overrides))


def _mildest(found: list[Remedy]) -> list[Remedy]:
    """Of remedies that set the same keys: the first, so the mildest, that is enough; else the one that saves most."""
    by_keys: dict[tuple[str, ...], Remedy] = {}
    for remedy in found:
        keys = tuple(override.partition("=")[0] for override in remedy.overrides)
        known = by_keys.get(keys)
        if known is None or (not known.fits and (remedy.fits or remedy.saved > known.saved)):
            by_keys[keys] = remedy
    return list(by_keys.values())


def _tried(
    config: Config | SupervisedConfig,
    now: Footprint,
    overrides: tuple[str, ...],
    again: Callable[[Config | SupervisedConfig], Footprint],
) -> Remedy | None:
    try:
        then = again(with_overrides(config, overrides))
    except ConfigError:  # a rule forbids it, or the cluster has too few GPUs for it
        return None
    saved = excess(now) - excess(then)
    cured = bool(now.problems) and not then.problems
    if saved < LEAST_GAIN * excess(now) and not cured:
        return None
    return Remedy(overrides, saved, then.fits) if saved > 0 or cured else None


def _candidates(config: Config | SupervisedConfig, now: Footprint) -> Iterator[tuple[str, ...]]:
    """What people would try, cheap things first."""
    trained = "actor" if isinstance(config, Config) else "model"
    settings = config.actor if isinstance(config, Config) else config.model
    if not settings.gradient_checkpointing_enable:
        yield (f"{trained}.gradient_checkpointing_enable=true",)
    rows = config.train.micro_batch_size
    while rows > 1 and not config.train.dynamic_batch_enable:
        rows //= 2
        yield (f"train.micro_batch_size={rows}",)
    if config.train.dynamic_batch_enable and config.train.max_tokens_per_gpu > config.data.max_len:
        yield (f"train.max_tokens_per_gpu={config.data.max_len}",)
    for stage in range(config.ds.zero_stage + 1, 4):
        yield (f"ds.zero_stage={stage}",)
    if not config.ds.adam_offload:
        yield ("ds.adam_offload=true",)
    if config.ds.param_dtype == "fp32":
        yield ("ds.param_dtype=bf16",)
    for ranks in (2, 4, 8):
        if ranks > settings.num_gpus_per_node and now.device == "gpu":
            yield (f"{trained}.num_gpus_per_node={ranks}",)
            yield (f"{trained}.num_gpus_per_node={ranks}", "ds.zero_stage=3")
            if isinstance(config, Config) and config.train.colocate_all:
                engines = f"vllm.num_engines={max(1, ranks // config.vllm.tensor_parallel_size)}"
                yield (f"{trained}.num_gpus_per_node={ranks}", engines)
                yield (f"{trained}.num_gpus_per_node={ranks}", engines, "ds.zero_stage=3")
    if not config.ds.lora.rank:
        yield ("ds.lora.rank=16",)
    if isinstance(config, Config):
        yield from _of_engines(config, now)


def _of_engines(config: Config, now: Footprint) -> Iterator[tuple[str, ...]]:
    vllm = config.vllm
    if config.needs_reference and not config.ref.offload:
        yield ("ref.offload=true",)
    if config.rollout.micro_batch_size > 1:
        yield ("rollout.micro_batch_size=1",)
    if now.device == "cpu":
        for gib in (8.0, 4.0, 2.0, 1.0, 0.5):
            if gib < vllm.cpu_kv_cache_gib or now.problems:
                yield (f"vllm.cpu_kv_cache_gib={gib}",)
        return
    if config.train.colocate_all:
        if not vllm.enable_sleep:
            yield ("vllm.enable_sleep=true",)
        if not config.ds.enable_sleep:
            yield ("ds.enable_sleep=true",)
        if not (vllm.enable_sleep and config.ds.enable_sleep):
            yield ("vllm.enable_sleep=true", "ds.enable_sleep=true")
        for share in (0.7, 0.5, 0.3):
            if share < vllm.gpu_memory_utilization:
                yield (f"vllm.gpu_memory_utilization={share}",)
    for gpus in (2, 4, 8):
        if gpus > vllm.tensor_parallel_size:
            yield (f"vllm.tensor_parallel_size={gpus}",)
    if now.problems and vllm.gpu_memory_utilization < 0.9:
        yield ("vllm.gpu_memory_utilization=0.9",)
