"""How long an iteration will take, by operations and bytes: an order of magnitude, with every assumption named.

Forward and backward pass of a token: 6 operations a parameter, and 12 L a d T for attention, half of it masked (Kaplan et al.
2020, arXiv:2001.08361, table 1; Chowdhery et al. 2022, arXiv:2204.02311, appendix B). With gradient checkpointing a third more.
Decoding reads all weights and the KV cache once a step, and is bound by that (Pope et al. 2022, arXiv:2211.05102).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_core.planning.memory import BYTES

if TYPE_CHECKING:
    from rlhf_core.config import Config
    from rlhf_core.planning.shape import ModelShape

FORWARD, BACKWARD, RECOMPUTED = 2, 4, 2  # operations of a token by parameter
BANDWIDTH_SHARE = 0.6  # of the memory's bandwidth that decoding reaches
PREFILL_SHARE = 0.5  # of ``mfu`` × peak; prompts are short, and steps mix with decoding


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one GPU (on CPU: of one process)."""

    name: str
    flops: float  # a second, dense, in the type of the parameters
    bandwidth: float  # bytes a second


# Datasheets: dense bf16 and HBM bandwidth.
GPUS = {
    "A100": Speed("A100", 312e12, 2.0e12),
    "H100": Speed("H100", 989e12, 3.35e12),
    "H200": Speed("H200", 989e12, 4.8e12),
    "B200": Speed("B200", 2250e12, 8.0e12),
    "L40S": Speed("L40S", 362e12, 0.864e12),
    "A10": Speed("A10", 125e12, 0.6e12),
    "RTX 4090": Speed("RTX 4090", 165e12, 1.0e12),
}
CORE = Speed(
    "a CPU core", 150e9, 8e9
)  # of a server; 40 % of it was measured in updates of a model of 135 million parameters


@dataclass(frozen=True, slots=True)
class IterationTime:
    """Seconds of the longest iteration, and what was assumed."""

    samples: int
    tokens: int  # prompts and answers at their longest
    generate: float
    score: float
    update: float
    mfu: float
    speed: Speed
    overlaps: bool

    @property
    def seconds(self) -> float:
        """Of an iteration: where rollout and update overlap, the longer of them."""
        trained = self.score + self.update
        return max(self.generate, trained) if self.overlaps else self.generate + trained

    @property
    def tokens_per_second(self) -> float:
        """Trained."""
        return self.tokens / self.seconds


def iteration_time(config: Config, shapes: dict[str, ModelShape], speed: Speed, mfu: float) -> IterationTime:
    """Of a full iteration whose answers are as long as they may be.

    Args:
        config: of the run.
        shapes: of its models, by role.
        speed: of a GPU, or of a process on CPU.
        mfu: share of the peak that forward and backward passes reach (model FLOPs utilisation).
    """
    samples = config.samples_per_iteration
    answer = min(config.rollout.max_new_tokens, config.data.max_len - 1)
    prompt = config.data.max_len - answer
    tokens = samples * config.data.max_len
    policy, train = shapes["policy"], config.train
    ranks = config.actor.world_size
    again = RECOMPUTED if config.actor.gradient_checkpointing_enable else 0
    factor = (FORWARD + BACKWARD + again) * train.max_epochs
    rate = speed.flops * mfu
    update = tokens * factor * _weight(policy, config.data.max_len) / (ranks * rate)
    score = 0.0 if config.reuses_logprobs else tokens * FORWARD * _weight(policy, config.data.max_len) / (ranks * rate)
    if "critic" in shapes:
        critic = _weight(shapes["critic"], config.data.max_len)
        update += tokens * (factor + FORWARD) * critic / (config.critic.world_size * rate)
    if "reference" in shapes:
        reference = _weight(shapes["reference"], config.data.max_len)
        score += tokens * FORWARD * reference / (config.ref.num_nodes * config.ref.num_gpus_per_node * rate)
    if "reward" in shapes:
        score += (
            tokens * FORWARD * _weight(shapes["reward"], config.data.max_len) / (config.reward.model_num_ranks * rate)
        )
    generate = 0.0 if config.is_replay else _generate(config, policy, samples, prompt, answer, speed, rate)
    return IterationTime(samples, tokens, generate, score, update, mfu, speed, config.overlaps)


def _generate(
    config: Config, shape: ModelShape, samples: int, prompt: int, answer: int, speed: Speed, rate: float
) -> float:
    engines, gpus = config.vllm.num_engines, config.vllm.tensor_parallel_size
    dtype = config.ds.param_dtype if config.vllm.dtype == "auto" else config.vllm.dtype
    at_once = max(1, min(config.vllm.max_num_seqs, -(-samples // engines)))
    waves = -(-samples // (engines * at_once))
    cache = at_once * shape.kv_elements * BYTES[dtype] * (prompt + answer / 2)
    read = (BYTES[dtype] * shape.active + cache) / (gpus * speed.bandwidth * BANDWIDTH_SHARE)
    computed = at_once * FORWARD * shape.active / (gpus * rate)
    prefill = samples * prompt * FORWARD * shape.active / (engines * gpus * rate * PREFILL_SHARE)
    return waves * answer * max(read, computed) + prefill


def _weight(shape: ModelShape, length: int) -> float:
    """Operations of a token by ``FORWARD``: its parameters, and causal attention over half a row."""
    return shape.active - shape.embedding + shape.layers * shape.heads * shape.head_dim * length
