"""Rules across fields: each its own function, each message naming the key, the value and the remedy.

A key whose feature is not built yet is in the tree, so that its path is known, and refused here: never ignored.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rlhf_core.config.model import Config, DataConfig
    from rlhf_core.config.supervised import SupervisedConfig, SupervisedDataConfig

# key -> what it would switch on. Any value other than the default is refused.
NOT_BUILT: dict[str, str] = {
    "actor.optim": "the Muon optimizer",
    "actor.muon": "the Muon optimizer",
    "critic.enable": "PPO with a critic",
    "actor.aux_loss_coef": "the mixture-of-experts balancing loss",
    "actor.freeze_visual_encoder": "vision-language training",
    "critic.model_name_or_path": "PPO with a critic",
    "critic.num_nodes": "PPO with a critic",
    "critic.num_gpus_per_node": "PPO with a critic",
    "critic.adam": "PPO with a critic",
    "critic.value_clip": "PPO with a critic",
    "critic.optim": "PPO with a critic",
    "critic.muon": "PPO with a critic",
    "critic.lr_scheduler": "PPO with a critic",
    "critic.lr_warmup_ratio": "PPO with a critic",
    "critic.min_lr_ratio": "PPO with a critic",
    "critic.max_norm": "PPO with a critic",
    "critic.gradient_checkpointing_enable": "PPO with a critic",
    "critic.freezing_steps": "PPO with a critic",
    "ref.offload": "offloading the reference model",
    "ds.adam_offload": "optimizer offload",
    "ds.tensor_parallel_size": "tensor parallelism in training",
    "ds.sequence_parallel_size": "sequence parallelism in training",
    "ds.ring_attn_size": "sequence parallelism in training",
    "ds.packing_samples": "sample packing",
    "ds.use_liger_kernel": "Liger kernels",
    "ds.load_in_4bit": "QLoRA",
    "ds.enable_sleep": "sleep of the training states",
    "ds.use_universal_ckpt": "universal checkpoints",
    "ds.lora": "LoRA",
    "vllm.enable_sleep": "sleep of the engines",
    "rollout.vllm_generate_batch_size": "over-sampling",
    "data.max_images_per_prompt": "vision-language prompts",
    "reward.remote_weight": "reward servers",
    "reward.remote_batch_size": "reward servers",
    "reward.remote_concurrency": "reward servers",
    "reward.remote_token_env": "reward servers",
    "reward.model_name_or_path": "trained reward models",
    "reward.model_weight": "trained reward models",
    "reward.model_num_ranks": "trained reward models",
    "reward.model_micro_batch_size": "trained reward models",
    "reward.model_max_len": "trained reward models",
    "reward.normalize_enable": "running reward normalisation",
    "algo.advantage.bootstrap_truncated": "PPO with a critic",
    "algo.dynamic_filtering_enable": "dynamic filtering",
    "algo.dynamic_filtering_range": "dynamic filtering",
    "algo.dynamic_filtering_max_rounds": "dynamic filtering",
    "algo.dynamic_filtering_on_limit": "dynamic filtering",
    "train.agent_func_path": "multi-turn and OpenAI-API agents",
    "train.async_enable": "the asynchronous pipeline",
    "train.async_queue_size": "the asynchronous pipeline",
    "train.partial_rollout_enable": "partial rollout",
    "train.colocate_all": "colocation",
    "train.colocate_actor_ref": "colocation",
    "train.colocate_critic_reward": "colocation",
    "train.enable_ema": "the moving average of the policy",
    "train.ema_beta": "the moving average of the policy",
    "ckpt.max_num": "checkpoint rotation",
    "ckpt.max_mem": "checkpoint rotation",
    "ckpt.best_metric_key": "best checkpoints",
    "ckpt.best_metric_mode": "best checkpoints",
    "logger.tensorboard_dir": "the TensorBoard logger",
    "logger.wandb": "the Weights & Biases logger",
}

# Names in the registries of rlhf_core.algorithms, which this package must not import; a test compares them.
ESTIMATORS = ("gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo")
POLICY_LOSSES = ("ppo", "gspo", "cispo")
NEEDS_GROUP = ("reinforce_baseline", "rloo", "group_norm", "dr_grpo")
FIXED_GAMMA = NEEDS_GROUP
FROM_FILE = re.compile(r".+\.py:\w+")

# Words of a key that holds a credential: `secret`, `aws_access_key_id`, `api-key`, `sas_token`, `connection_string` ...
CREDENTIAL = re.compile(
    r"(^|[^a-z])(key|secret|token|password|passwd|passphrase|credentials?|connection_string)([^a-z]|$)", re.IGNORECASE
)
URLS = ("storage.root", "logger.mlflow_uri", "run.ray_address")


def check(config: Config) -> None:
    """Raise ``ConfigError`` with every violated rule, so that one try shows all of them."""
    problems = [problem for rule in RULES for problem in rule(config)]
    if problems:
        raise ConfigError("\n".join(problems))


def value_at(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def default_at(config: Any, key: str) -> Any:
    """The default of a dotted key."""
    *sections, name = key.split(".")
    for part in sections:
        config = getattr(config, part)
    field = type(config).model_fields[name]
    return field.get_default(call_default_factory=True)


def keys_not_built(config: Config) -> Iterator[str]:
    """Refuse, never ignore, a key whose feature does not exist yet."""
    for key, feature in NOT_BUILT.items():
        value = value_at(config, key)
        if value != default_at(config, key):
            yield f"{key}={value!r}: {feature} is not available in this version; remove the key"
    if config.algo.advantage.estimator == "gae":
        yield (
            "algo.advantage.estimator='gae': PPO with a critic is not available in this version; use reinforce, "
            "reinforce_baseline, rloo, group_norm or dr_grpo"
        )
    urls = [url for url in config.reward.remote_url if "://" in url]
    if urls:
        yield f"reward.remote_url={','.join(urls)}: reward servers are not available in this version; name a .py file"


def algorithms_exist(config: Config) -> Iterator[str]:
    """A name of the registry, or a name in a file of the user's; what the file holds is looked at when it is loaded."""
    named = (
        ("algo.advantage.estimator", config.algo.advantage.estimator, ESTIMATORS),
        ("actor.policy_loss_type", config.actor.policy_loss_type, POLICY_LOSSES),
    )
    for key, value, known in named:
        if value not in known and not FROM_FILE.fullmatch(value):
            yield f"{key}={value!r}: use one of {', '.join(known)}, or 'path.py:name' for your own"


def critic_is_wanted(config: Config) -> Iterator[str]:
    """gae has no values without a critic; a critic that nothing reads is a waste."""
    estimator, enabled = config.algo.advantage.estimator, config.critic.enable
    if estimator == "gae" and enabled is False:
        yield "algo.advantage.estimator='gae' needs the critic's values: remove critic.enable=false"
    if estimator in ESTIMATORS and estimator != "gae" and enabled:
        yield f"critic.enable=true, but algo.advantage.estimator={estimator!r} does not look at values: remove it, or use gae"


def group_estimators_need_groups(config: Config) -> Iterator[str]:
    """A baseline of the group needs more than one sample."""
    estimator, n = config.algo.advantage.estimator, config.rollout.n_samples_per_prompt
    if estimator in NEEDS_GROUP and n < 2:
        yield (
            f"algo.advantage.estimator={estimator!r} compares the samples of one prompt, but "
            f"rollout.n_samples_per_prompt={n}: set it to 2 or more, or use the estimator 'reinforce'"
        )


def gamma_is_one(config: Config) -> Iterator[str]:
    """Group estimators are defined for gamma 1 (ALGORITHMS section 2)."""
    advantage = config.algo.advantage
    if advantage.estimator in FIXED_GAMMA and advantage.gamma != 1.0:
        yield (
            f"algo.advantage.gamma={advantage.gamma} has no meaning with algo.advantage.estimator="
            f"{advantage.estimator!r}: set it to 1, or use the estimator 'reinforce'"
        )


def steps_divide(config: Config) -> Iterator[str]:
    """A rollout is a whole number of optimizer steps, and a step a whole number of rows per rank."""
    samples, step, ranks = config.samples_per_iteration, config.samples_per_step, config.actor.world_size
    if samples % step:
        yield (
            f"train.batch_size={step} does not divide rollout.batch_size × rollout.n_samples_per_prompt = {samples}: "
            "choose a divisor"
        )
    if step % ranks:
        yield (
            f"train.batch_size={step} (default: the whole rollout) does not divide over {ranks} ranks "
            "(actor.num_nodes × actor.num_gpus_per_node): choose a multiple of them"
        )


def lengths_fit(config: Config) -> Iterator[str]:
    """Prompt and answer share the context."""
    new, total, context = config.rollout.max_new_tokens, config.data.max_len, config.max_model_len
    if new >= total:
        yield f"rollout.max_new_tokens={new} leaves no room for a prompt in data.max_len={total}: raise data.max_len"
    if context < total:
        yield f"vllm.max_model_len={context} is shorter than data.max_len={total}: raise it, or lower data.max_len"
    if config.rollout.min_new_tokens > new:
        yield f"rollout.min_new_tokens={config.rollout.min_new_tokens} is above rollout.max_new_tokens={new}: lower it"
    budget = config.train.max_tokens_per_gpu
    if config.train.dynamic_batch_enable and budget < total:
        yield f"train.max_tokens_per_gpu={budget} cannot hold one sample of data.max_len={total}: raise it"
    budget_rollout = config.rollout.max_tokens_per_gpu
    if config.train.dynamic_batch_enable and budget_rollout is not None and budget_rollout < total:
        yield f"rollout.max_tokens_per_gpu={budget_rollout} cannot hold one sample of data.max_len={total}: raise it"


def reward_source_exists(config: Config) -> Iterator[str]:
    """Something must score the answers; two sources must not hide each other."""
    reward = config.reward
    if not reward.functions and not reward.remote_url and reward.model_name_or_path is None:
        yield "no reward source: set reward.functions or reward.remote_url (see docs/rewards.md)"
    if reward.functions and reward.remote_url:
        yield "reward.functions and reward.remote_url are both set: list the file of reward.remote_url in reward.functions"
    files = [url for url in reward.remote_url if "://" not in url]
    if len(files) > 1:
        yield f"reward.remote_url={','.join(files)} names several files: list them in reward.functions with their weights"
    if reward.clip_range is not None and reward.clip_range[0] >= reward.clip_range[1]:
        yield f"reward.clip_range={reward.clip_range} is empty: give (low, high)"
    buffer = reward.overlong_buffer_len
    if buffer is not None and buffer > config.rollout.max_new_tokens:
        limit = config.rollout.max_new_tokens
        yield f"reward.overlong_buffer_len={buffer} is longer than rollout.max_new_tokens={limit}: lower it"


def kl_loss_needs_reference(config: Config) -> Iterator[str]:
    """KL as a loss, or a target for it, needs a reference model."""
    kl = config.algo.kl
    if kl.use_loss and kl.init_coef <= 0:
        yield "algo.kl.use_loss needs a reference model: set algo.kl.init_coef > 0"
    if kl.target is not None and kl.init_coef <= 0:
        yield "algo.kl.target steers algo.kl.init_coef, which is 0: set algo.kl.init_coef > 0"
    if config.ref.model_name_or_path is not None and kl.init_coef <= 0:
        yield "ref.model_name_or_path is set, but algo.kl.init_coef=0 makes no reference model: set it > 0"


def correction_range(config: Config) -> Iterator[str]:
    """The range of the mismatch correction is not empty."""
    low, high = config.algo.advantage.is_correction_threshold
    if low >= high:
        yield f"algo.advantage.is_correction_threshold=({low}, {high}) is empty: give (low, high)"


def probabilities_match(config: Config) -> Iterator[str]:
    """One weight per dataset."""
    data = config.data
    yield from probability_problems("data.prompt_probs", data.prompt_probs, "data.prompt_dataset", data.prompt_dataset)


def probability_problems(
    key: str, probs: Sequence[float] | None, datasets_key: str, datasets: Sequence[str]
) -> Iterator[str]:
    """What is wrong with mixing weights."""
    if probs is None:
        return
    if len(probs) != len(datasets):
        yield f"{key}={probs} for {len(datasets)} datasets in {datasets_key}: give one weight each"
    if any(p < 0 for p in probs) or sum(probs) <= 0:
        yield f"{key}={probs}: weights must not be negative, and not all 0"


def templates_agree(config: Config) -> Iterator[str]:
    """Either a chat template or a plain one."""
    yield from template_problems(config.data)


def template_problems(data: DataConfig | SupervisedDataConfig) -> Iterator[str]:
    """What is wrong with the templates of a data section."""
    if data.apply_chat_template and data.input_template is not None:
        yield "data.input_template and data.apply_chat_template are both set: choose one"
    if data.input_template is not None and data.input_template.count("{}") != 1:
        yield (
            f"data.input_template={data.input_template!r} must hold exactly one '{{}}' for the prompt "
            "(other braces stay as they are)"
        )
    if data.system_prompt is not None and not data.apply_chat_template:
        yield "data.system_prompt needs data.apply_chat_template=true"
    if data.tokenizer_chat_template is not None and not data.apply_chat_template:
        yield "data.tokenizer_chat_template needs data.apply_chat_template=true"


def evaluation_is_complete(config: Config) -> Iterator[str]:
    """pass@k needs k answers, and several greedy answers are one."""
    evaluation = config.eval
    if evaluation.steps > 0 and not evaluation.dataset:
        yield f"eval.steps={evaluation.steps} without eval.dataset: name the held-out prompts"
    too_many = [k for k in evaluation.pass_k if k > evaluation.n_samples_per_prompt]
    if too_many:
        yield f"eval.pass_k={too_many} needs eval.n_samples_per_prompt >= {max(too_many)}"
    if evaluation.n_samples_per_prompt > 1 and evaluation.temperature == 0:
        yield (
            f"eval.n_samples_per_prompt={evaluation.n_samples_per_prompt} greedy answers are all the same: "
            "set eval.temperature > 0"
        )


def steps_are_positive(config: Config) -> Iterator[str]:
    """0 means neither 'never' nor 'always': say which."""
    yield from step_problems(config)


def step_problems(config: Config | SupervisedConfig) -> Iterator[str]:
    """What is wrong with the intervals."""
    for key in ("eval.steps", "ckpt.save_steps"):
        if value_at(config, key) == 0:
            yield f"{key}=0: use -1 for 'only at the end', or a positive number of iterations"


def no_credentials(config: Config) -> Iterator[str]:
    """The configuration is stored with the run and shown by trackers."""
    yield from credential_problems(config)
    for url in config.reward.remote_url:
        if "@" in urlsplit(url).netloc:
            yield (
                "reward.remote_url has a URL with a user or password in it, and the configuration is stored and shown: "
                "remove them, and name the variable that holds the servers' token in reward.remote_token_env"
            )


def credential_problems(config: Config | SupervisedConfig) -> Iterator[str]:
    """The message names the key, never its value."""
    for key in credential_keys(config.storage.options, "storage.options"):
        yield (
            f"{key} is a credential, and the configuration is stored and shown: remove it, and give it to the processes "
            "through the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, ... or an instance role)"
        )
    for key in URLS:
        if "@" in urlsplit(value_at(config, key) or "").netloc:
            yield (
                f"{key} is a URL with a user or password in it, and the configuration is stored and shown: remove them, and "
                "use the environment (MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD, AWS_ACCESS_KEY_ID, ...)"
            )


def credential_keys(tree: Any, prefix: str) -> Iterator[str]:
    """Dotted keys, at any depth, whose names say that they hold a credential."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            path = f"{prefix}.{key}"
            if CREDENTIAL.search(str(key)):
                yield path
            else:
                yield from credential_keys(value, path)


def backends_match_device(config: Config) -> Iterator[str]:
    """Settings that exist on one kind of device only, where the device is named; else ``cluster.placement`` asks."""
    if config.run.device != "auto":
        yield from misfits(config, config.run.device)


def misfits(config: Config, device: str) -> Iterator[str]:
    """What of the configuration does not exist on ``device``, "cpu" or "gpu"."""
    if device == "gpu":
        if config.vllm.sync_backend == "shm":
            yield "vllm.sync_backend='shm' is for engines on CPU: use 'nccl' or 'auto' on GPUs"
        return
    if config.vllm.sync_backend in ("nccl", "ipc"):
        yield f"vllm.sync_backend={config.vllm.sync_backend!r} needs GPUs, and the run is on CPU: use 'shm' or 'auto'"
    if config.ds.attn_implementation.startswith("flash"):
        yield f"ds.attn_implementation={config.ds.attn_implementation!r} needs a GPU: use 'sdpa' on CPU"
    if config.ds.param_dtype == "fp16":
        yield "ds.param_dtype='fp16' needs a GPU: use 'bf16' or 'fp32' on CPU"


RULES: tuple[Callable[[Config], Iterator[str]], ...] = (
    keys_not_built,
    algorithms_exist,
    critic_is_wanted,
    group_estimators_need_groups,
    gamma_is_one,
    steps_divide,
    lengths_fit,
    reward_source_exists,
    kl_loss_needs_reference,
    correction_range,
    probabilities_match,
    templates_agree,
    evaluation_is_complete,
    steps_are_positive,
    backends_match_device,
    no_credentials,
)
