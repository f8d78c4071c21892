"""Rules for pipelines: what overlaps, what takes turns, and what must fit together then.

::

    train.async_enable ──┬─ async_queue_size ─▶ how old a token may be ─▶ what must be corrected
                         └─ partial_rollout_enable ──┬─ partial_rollout_kv, partial_rollout_mask_old
                                                     └─ rollout.vllm_generate_batch_size: what is in flight
    train.colocate_all ──┬─ vllm.enable_sleep, ds.enable_sleep
                         └─ one size for all: process i of each sits on GPU i

A replay has the keys of the run that it replays and nothing that overlaps: what is wrong in it is wrong in any run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.config.group_sizes import engines_of, model_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rlhf_core.config.model import Config

ASYNC_KEYS = ("async_queue_size", "partial_rollout_enable")
PARTIAL_KEYS = ("partial_rollout_kv", "partial_rollout_mask_old")
SIZE_KEYS = {
    "policy": "actor.num_nodes × actor.num_gpus_per_node",
    "critic": "critic.num_nodes × critic.num_gpus_per_node",
    "reference": "ref.num_nodes × ref.num_gpus_per_node",
    "reward": "reward.model_num_ranks",
}
RENORMALISING = ("top_p", "top_k", "min_new_tokens")  # records.SamplingParams.constrained


def async_keys_have_a_pipeline(config: Config) -> Iterator[str]:
    """A key that nothing reads is a mistake."""
    for switch, names in (("async_enable", ASYNC_KEYS), ("partial_rollout_enable", PARTIAL_KEYS)):
        for name in names:
            value = getattr(config.train, name)
            if value != type(config.train).model_fields[name].default and not getattr(config.train, switch):
                yield f"train.{name}={value!r} without train.{switch}: set it to true, or remove train.{name}"


def partial_rollouts_pay(config: Config) -> Iterator[str]:
    """Requests go on over a weight sync only where there are some: where no rollout waits for it, nor for the end of a lot."""
    train, size, batch = config.train, config.generate_batch_size, config.rollout.batch_size
    if not train.partial_rollout_enable:
        return
    if train.async_queue_size == 0:
        yield (
            "train.partial_rollout_enable with train.async_queue_size=0: no request is in flight at a weight sync where "
            "rollouts wait for the newest version: raise train.async_queue_size"
        )
    if size < batch:
        yield (
            f"rollout.vllm_generate_batch_size={size} waits for the end of each lot of a batch of rollout.batch_size={batch}, "
            "and with train.partial_rollout_enable nothing is to wait: raise it to rollout.batch_size or more, or remove it"
        )


def old_tokens_have_one_bound(config: Config) -> Iterator[str]:
    """How old a token may be is said once, and only where one can be old."""
    most, train = config.rollout.max_age, config.train
    if most is None:
        return
    if train.async_enable and most != train.async_queue_size:
        yield (
            f"rollout.max_age={most}, but with train.async_enable it is train.async_queue_size={train.async_queue_size} that "
            "bounds the age of every token, of groups that were kept too: remove rollout.max_age"
        )
    if not train.async_enable and not config.fills_batches:
        yield (
            f"rollout.max_age={most} bounds the age of groups that were kept for a later batch, and none is kept: set "
            "rollout.vllm_generate_batch_size or algo.dynamic_filtering_enable, or remove it"
        )


def old_tokens_are_corrected(config: Config) -> Iterator[str]:
    """Tokens of an older version, taken for those of the trained one, bias the gradient."""
    train, lag = config.train, config.rollout_lag
    reasons = list(_uncorrected(config))
    if lag and not train.allow_uncorrected:
        for reason in reasons:
            yield (
                f"{reason}, but tokens may be {lag} version{'' if lag == 1 else 's'} older than the policy that trains on them "
                "(train.async_queue_size): remove it, or accept the biased gradient with train.allow_uncorrected=true"
            )
    if train.allow_uncorrected and not (lag and reasons) and not config.is_replay:
        yield "train.allow_uncorrected allows nothing: no token is older, or every one is corrected: remove it"


def turns_do_not_overlap(config: Config) -> Iterator[str]:
    """Who shares a GPU takes turns."""
    train, ref = config.train, config.ref
    if train.colocate_all and train.async_enable:
        yield (
            "train.colocate_all takes turns on the same GPUs, train.async_enable overlaps: remove one of them "
            "(train.colocate_actor_ref and train.colocate_critic_reward go with train.async_enable)"
        )
    for key, asleep in (("vllm.enable_sleep", config.vllm.enable_sleep), ("ds.enable_sleep", config.ds.enable_sleep)):
        if asleep and not train.colocate_all:
            yield f"{key} frees memory that nobody else uses without train.colocate_all: set it to true, or remove {key}"
    if config.vllm.sleep_level != 1 and not config.vllm.enable_sleep:
        level = config.vllm.sleep_level
        yield f"vllm.sleep_level={level} without vllm.enable_sleep: set it to true, or remove vllm.sleep_level"
    if train.colocate_actor_ref and not config.needs_reference:
        yield "train.colocate_actor_ref, but algo.kl.init_coef=0 makes no reference model: set it > 0, or remove the key"
    if train.colocate_critic_reward and not (config.needs_critic and config.reward.model_name_or_path):
        yield (
            "train.colocate_critic_reward needs a critic and a reward model: set algo.advantage.estimator='gae' and "
            "reward.model_name_or_path, or remove the key"
        )
    if ref.offload and not config.needs_reference:
        yield "ref.offload, but algo.kl.init_coef=0 makes no reference model: set it > 0, or remove the key"


def groups_that_share_gpus_have_one_size(config: Config) -> Iterator[str]:
    """Process i of each sits on GPU i, so that every GPU carries the same, and each engine finds its weights on its GPUs."""
    train, ranks = config.train, model_ranks(config)
    pairs: list[tuple[str, str, str]] = []
    if train.colocate_all:
        pairs = [("train.colocate_all", "policy", role) for role in ("critic", "reference", "reward")]
        tensor_parallel = config.vllm.tensor_parallel_size
        if engines_of(config) and engines_of(config) * tensor_parallel != ranks["policy"]:
            yield (
                f"train.colocate_all: vllm.num_engines={config.vllm.num_engines} × "
                f"vllm.tensor_parallel_size={tensor_parallel} must be {SIZE_KEYS['policy']} = {ranks['policy']}: set them so"
            )
    else:
        if train.colocate_actor_ref:
            pairs.append(("train.colocate_actor_ref", "policy", "reference"))
        if train.colocate_critic_reward:
            pairs.append(("train.colocate_critic_reward", "critic", "reward"))
    for key, first, second in pairs:
        if 0 not in (ranks[first], ranks[second]) and ranks[second] != ranks[first]:
            yield (
                f"{key}: {SIZE_KEYS[second]} = {ranks[second]} must be {SIZE_KEYS[first]} = {ranks[first]}: set it so, or "
                f"remove {key}"
            )


def weights_find_the_engines(config: Config) -> Iterator[str]:
    """GPU to GPU, or within one."""
    backend, shares = config.vllm.sync_backend, config.train.colocate_all
    if backend == "nccl" and shares:
        yield "vllm.sync_backend='nccl' with train.colocate_all: NCCL joins no two processes of one GPU: use 'ipc' or 'auto'"
    if backend == "ipc" and not shares:
        yield (
            "vllm.sync_backend='ipc' without train.colocate_all: engines cannot open memory of another GPU's process: use "
            "'nccl' or 'auto'"
        )


def renormalising_keys(config: Config) -> Iterator[str]:
    """What is set so that the engine's log-probs are not the policy's own: such rows get no correction."""
    for name in RENORMALISING:
        value = getattr(config.rollout, name)
        if value != type(config.rollout).model_fields[name].default:
            yield f"rollout.{name}={value}"


def _uncorrected(config: Config) -> Iterator[str]:
    """What leaves tokens as if the trained version had spoken them."""
    if config.algo.advantage.is_correction_enable is False:
        yield "algo.advantage.is_correction_enable=false corrects nothing"
    for key in renormalising_keys(config):
        yield f"{key} renormalises the engine's log-probs, so that its rows cannot be corrected"


PIPELINE_RULES: tuple[Callable[[Config], Iterator[str]], ...] = (
    async_keys_have_a_pipeline,
    partial_rollouts_pay,
    old_tokens_have_one_bound,
    old_tokens_are_corrected,
    turns_do_not_overlap,
    groups_that_share_gpus_have_one_size,
    weights_find_the_engines,
)
