"""Bytes that a run writes to its storage.

Shards are compressed (zstd): log-probs hardly, token ids to about a half, columns of equal numbers to nothing. The bytes by
token are measured on runs of this project.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_core.planning.memory import BYTES, Training, optimizer_bytes

if TYPE_CHECKING:
    from rlhf_core.config import Config
    from rlhf_core.planning.shape import ModelShape

ROLLOUT_TOKEN = 7.0  # ids, log-prob, text
EXPERIENCE_TOKEN = 5.0  # ids, log-prob of the engine, advantages
COLUMN_TOKEN = 3.7  # another column of log-probs or values
SAMPLE = 60.0  # of the rest of a row, in all three stages
MANIFESTS = 12_000  # of an iteration


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes in ``storage.root``."""

    iteration: float
    checkpoint: float
    iterations: int | None  # of the run; None: the data say
    checkpoints: int | None  # kept at the end; None: it depends on the iterations
    total: float | None


def disk_of(config: Config, policy: ModelShape, critic: ModelShape | None, how: Training) -> Disk:
    """Of a run by rewards.

    Args:
        config: of the run.
        policy: its model.
        critic: its other model that learns.
        how: the policy is trained.
    """
    tokens = config.samples_per_iteration * config.data.max_len
    columns = (not config.reuses_logprobs) + config.needs_reference + 3 * config.needs_critic
    of_token = EXPERIENCE_TOKEN + COLUMN_TOKEN * columns + (0 if config.is_replay else ROLLOUT_TOKEN)
    iteration = tokens * of_token + SAMPLE * config.samples_per_iteration + MANIFESTS
    checkpoint = sum(checkpoint_bytes(shape, how, config) for shape in (policy, critic) if shape is not None)
    iterations, checkpoints, total = config.train.max_iterations, config.ckpt.max_num, None
    if iterations is not None:
        saved = 1 if config.ckpt.save_steps <= 0 else -(-iterations // config.ckpt.save_steps)
        checkpoints = saved if checkpoints is None else min(saved, checkpoints + 1)  # the best one besides
        total = iterations * iteration + checkpoints * checkpoint
    return Disk(iteration, checkpoint, iterations, checkpoints, total)


def checkpoint_bytes(shape: ModelShape, how: Training, config: Config) -> float:
    """Of one: DeepSpeed's copy of the parameters, the optimizer, the exported model, its moving average."""
    exported = BYTES[how.dtype] * shape.parameters * (config.ckpt.save_hf + config.train.enable_ema)
    parameters = 0 if config.ds.use_universal_ckpt else BYTES[how.dtype] * shape.parameters
    return exported + parameters + optimizer_bytes(shape, how)
