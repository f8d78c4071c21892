"""Rules across the keys that spread one model over ranks: what divides what, and what needs what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.config.group_sizes import model_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rlhf_core.config.model import Config
    from rlhf_core.config.supervised import SupervisedConfig
    from rlhf_core.config.trained import DeepSpeedConfig

SECTIONS = {
    "policy": "actor",
    "critic": "critic",
    "reference": "ref",
}  # role to section, of models that DeepSpeed holds


def rows_divide(config: Config) -> Iterator[str]:
    """Sequence parallelism: see ``sequence_problems``."""
    ranks = {SECTIONS[role]: count for role, count in model_ranks(config).items() if role in SECTIONS}
    yield from sequence_problems(config.ds, ranks)


def layers_divide(config: Config) -> Iterator[str]:
    """Tensor parallelism: see ``tensor_problems``."""
    ranks = {SECTIONS[role]: count for role, count in model_ranks(config).items() if role in SECTIONS}
    trained = ("actor", "critic") if config.needs_critic else ("actor",)
    yield from tensor_problems(config, ranks, *trained)
    size, images = config.ds.tensor_parallel_size, config.data.max_images_per_prompt
    if size > 1 and images:
        yield (
            f"ds.tensor_parallel_size={size} divides models that read text only, and data.max_images_per_prompt={images}: use "
            "ds.zero_stage=3"
        )


def copies_are_of_shards(config: Config) -> Iterator[str]:
    """hpZ: see ``secondary_shard_problems``."""
    critic = {"critic": config.critic.world_size} if config.needs_critic else {}
    yield from secondary_shard_problems(config.ds, {"actor": config.actor.world_size, **critic})


def offload_has_shards(config: Config) -> Iterator[str]:
    """Optimizer offload: see ``offload_problems``."""
    yield from offload_problems(config, "actor", "critic")


def sequence_problems(ds: DeepSpeedConfig, ranks: Mapping[str, int]) -> Iterator[str]:
    """What is wrong with the ranks that share rows.

    Args:
        ds: DeepSpeed's settings.
        ranks: of each model, by its section; 0: there is no such model.
    """
    size, key = ds.ranks_per_row, "sequence_parallel_size" if ds.sequence_parallel_size > 1 else "ring_attn_size"
    if ds.sequence_parallel_size > 1 and ds.ring_attn_size not in (1, ds.sequence_parallel_size):
        yield (
            f"ds.ring_attn_size={ds.ring_attn_size} and ds.sequence_parallel_size={ds.sequence_parallel_size} are names of one "
            "setting: remove ds.ring_attn_size"
        )
    if size > 1 and not ds.packing_samples:
        yield f"ds.{key}={size} divides packed rows over ranks: set ds.packing_samples=true"
    for section, count in ranks.items():
        if count % size:
            yield (
                f"ds.{key}={size} does not divide the {count} ranks of {section}.num_nodes × {section}.num_gpus_per_node: "
                "use a divisor of them, or other ranks"
            )


def tensor_problems(config: Config | SupervisedConfig, ranks: Mapping[str, int], *trained: str) -> Iterator[str]:
    """What is wrong with the ranks that share layers; adapters: ``rules.adapter_problems``.

    Args:
        config: of any kind of training.
        ranks: of each model, by its section; 0: there is no such model.
        trained: sections of models that learn.
    """
    ds = config.ds
    size, key = ds.tensor_parallel_size, f"ds.tensor_parallel_size={ds.tensor_parallel_size}"
    if size == 1:
        return
    for section, count in ranks.items():
        if count % size:
            yield (
                f"{key} does not divide the {count} ranks of {section}.num_nodes × {section}.num_gpus_per_node: use a divisor "
                "of them"
            )
    if ds.zero_stage == 3:
        yield f"{key} with ds.zero_stage=3, which shards every parameter already: use ds.zero_stage=2, or remove the former"
    if ds.zero_stage == 0 and ds.param_dtype != "fp32":
        yield (
            f"{key} with ds.zero_stage=0 and ds.param_dtype={ds.param_dtype!r}: DeepSpeed's norm of the gradient would leave "
            "out most layers: use ds.zero_stage=1 or 2"
        )
    if ds.param_dtype == "fp16":
        yield f"{key} with ds.param_dtype='fp16', whose loss scale its ranks would have to share: use bf16"
    if ds.ranks_per_row > 1:
        yield f"{key} divides layers, and ds.sequence_parallel_size={ds.ranks_per_row} rows, among the same ranks: remove one"
    if ds.use_liger_kernel:
        yield f"{key} with ds.use_liger_kernel, which computes whole layers: remove one"
    for section in trained:
        if getattr(config, section).optim == "muon":
            yield f"{key} with {section}.optim='muon', which orthogonalises whole matrices: use adam"


def secondary_shard_problems(ds: DeepSpeedConfig, ranks: Mapping[str, int]) -> Iterator[str]:
    """What is wrong with hpZ. ``ranks``: of each trained model, by its section."""
    if ds.zpg > 1 and ds.zero_stage != 3:
        yield f"ds.zpg={ds.zpg} is about parameters that are sharded: set ds.zero_stage=3 (it is {ds.zero_stage}), or remove it"
    for section, count in ranks.items():
        if count % ds.zpg:
            yield (
                f"ds.zpg={ds.zpg} does not divide the {count} ranks of {section}.num_nodes × {section}.num_gpus_per_node: use "
                "the ranks of a node"
            )


def offload_problems(config: Config | SupervisedConfig, *sections: str) -> Iterator[str]:
    """What is wrong with optimizer offload. ``sections``: of trained models."""
    ds = config.ds
    if ds.adam_offload and ds.zero_stage == 0:
        yield "ds.adam_offload=true is DeepSpeed's ZeRO-Offload, and ds.zero_stage=0: set it to 1, 2 or 3"
    for section in sections:
        if ds.adam_offload and getattr(config, section).optim == "muon":
            yield (
                f"ds.adam_offload=true with {section}.optim='muon', which orthogonalises matrices on the device: use adam, or "
                "remove ds.adam_offload"
            )


PARALLEL_RULES: tuple[Callable[[Config], Iterator[str]], ...] = (
    rows_divide,
    layers_divide,
    copies_are_of_shards,
    offload_has_shards,
)
