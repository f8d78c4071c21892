"""A run that is resumed with other processes: when it may be, and what is written down of it.

::

    newest checkpoint is universal ─▶ other ranks, another ZeRO stage ─▶ worlds/….json, a checkpoint at once ─▶ on it goes

The weights are those of the log where it goes on, but for updates since the newest checkpoint: these are made again by the new
ranks, and come out with other last digits. The checkpoint at once makes them what later attempts go on from.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from rlhf_core.config import SupervisedConfig
from rlhf_core.storage import CheckpointStore, World, read_worlds, record_world, worlds_in_words
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from rlhf_core.config import Config
    from rlhf_core.storage import RunStore

logger = get_logger(__name__)

# How many processes a run has: these keys, with universal checkpoints, may differ between two attempts.
SHARED_KEYS = ("ds.zero_stage", "ds.sequence_parallel_size", "ds.ring_attn_size", "ds.tensor_parallel_size")
KEYS = (
    "actor.num_nodes",
    "actor.num_gpus_per_node",
    "critic.num_nodes",
    "critic.num_gpus_per_node",
    "ref.num_nodes",
    "ref.num_gpus_per_node",
    "vllm.num_engines",
    "vllm.tensor_parallel_size",
    *SHARED_KEYS,
)
SUPERVISED_KEYS = ("model.num_nodes", "model.num_gpus_per_node", *SHARED_KEYS)


def world_keys(config: Config | SupervisedConfig) -> tuple[str, ...]:
    """Dotted keys of the configuration that make up a world."""
    return SUPERVISED_KEYS if isinstance(config, SupervisedConfig) else KEYS


def in_newest_world(config: Mapping[str, Any], worlds: Sequence[World]) -> dict[str, Any]:
    """The configuration a run was started with, with the processes it has had last."""
    changed = copy.deepcopy(dict(config))
    for key, value in worlds[-1].settings.items() if worlds else ():
        *sections, name = key.split(".")
        inner = changed
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return changed


def may_move(store: RunStore, config: Config | SupervisedConfig) -> bool:
    """True if other processes can go on from the run's newest checkpoint; without one, if those to come are universal."""
    newest = CheckpointStore(store).newest()
    return config.ds.use_universal_ckpt if newest is None else bool(newest[1].get("universal"))


def is_move(changed: Collection[str], config: Config | SupervisedConfig) -> bool:
    """True if only the processes differ."""
    return bool(changed) and set(changed) <= set(world_keys(config))


def ranks_change(changed: Collection[str]) -> bool:
    """True if the cores are shared by another number of training ranks."""
    return any(key.partition(".")[0] in ("actor", "critic", "model") for key in changed)


def move(store: RunStore, config: Config | SupervisedConfig, cpu_threads: int) -> World:
    """Write down that the run goes on with the processes of ``config``."""
    newest = store.newest_update()
    since = 0 if newest is None else newest[0] + 1
    dump = config.model_dump(mode="json")
    settings = {key: dump[key.split(".")[0]][key.split(".")[1]] for key in world_keys(config)}
    world = World(since, settings, cpu_threads)
    record_world(store, world)
    logger.warning(
        "run %s goes on with other processes, and its weights differ, in their last digits, from those it would have had: %s",
        store.run_id,
        worlds_in_words(read_worlds(store)),
    )
    return world


def begins_a_world(store: RunStore, version: int) -> bool:
    """True if the run went on with other processes at this version: then it is saved."""
    return any(world.since == version for world in read_worlds(store)[1:])
