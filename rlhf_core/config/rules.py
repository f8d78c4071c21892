"""Rules across fields: each its own function, each message naming the key, the value and the remedy."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from rlhf_core.config.agent_rules import AGENT_RULES
from rlhf_core.config.model_spec import is_run_model, parse_run_model
from rlhf_core.config.parallel_rules import PARALLEL_RULES
from rlhf_core.config.pipeline_rules import PIPELINE_RULES
from rlhf_core.config.vision_rules import VISION_RULES
from rlhf_core.errors import ConfigError
from rlhf_core.redaction import holds_secret, names_credential
from rlhf_core.user_file import FROM_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rlhf_core.config.model import Config, DataConfig, RewardConfig
    from rlhf_core.config.supervised import SupervisedConfig, SupervisedDataConfig

# Names in the registries of rlhf_core.algorithms, which this package must not import; a test compares them.
ESTIMATORS = ("gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo")
POLICY_LOSSES = ("ppo", "gspo", "cispo")
NEEDS_GROUP = ("reinforce_baseline", "rloo", "group_norm", "dr_grpo")
FIXED_GAMMA = NEEDS_GROUP

MODELS = ("actor", "ref", "critic", "reward")  # sections that name one
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


def critic_keys_have_a_critic(config: Config) -> Iterator[str]:
    """A model that is named and never loaded, or values that are asked of nobody, are a mistake."""
    for key in ("critic.model_name_or_path", "algo.advantage.bootstrap_truncated"):
        value = value_at(config, key)
        if value != default_at(config, key) and not config.needs_critic:
            yield (
                f"{key}={value!r}, but there is no critic with algo.advantage.estimator={config.algo.advantage.estimator!r}: "
                "remove it, use gae, or set critic.enable=true for an estimator of your own"
            )


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


def freezing_leaves_iterations(config: Config) -> Iterator[str]:
    """A policy that never learns is a mistake."""
    frozen, most = config.critic.freezing_steps, config.train.max_iterations
    if config.needs_critic and most is not None and frozen >= most:
        yield f"critic.freezing_steps={frozen} leaves none of train.max_iterations={most} to the policy: lower it"


def muon_is_not_clipped(config: Config) -> Iterator[str]:
    """Muon's updates are orthogonal matrices whatever the size of the gradients."""
    yield from clipping_problems(config, "actor", "critic")


def clipping_problems(config: Config | SupervisedConfig, *sections: str) -> Iterator[str]:
    """What is wrong with the clipping of trained models."""
    for section in sections:
        optim, key = value_at(config, f"{section}.optim"), f"{section}.max_norm"
        if optim == "muon" and value_at(config, key) != default_at(config, key):
            yield f"{key}={value_at(config, key):g} clips nothing with {section}.optim='muon': remove it"


def packed_samples_stay_apart(config: Config) -> Iterator[str]:
    """Attention computes each sample of a packed row by itself."""
    yield from packing_problems(config)


def packing_problems(config: Config | SupervisedConfig) -> Iterator[str]:
    """Eager attention is a model's own code: it makes the scores of all pairs of tokens of a row, then masks most of them."""
    if config.ds.packing_samples and config.ds.attn_implementation == "eager":
        yield (
            "ds.packing_samples with ds.attn_implementation='eager' would compute attention between all samples of a row, only "
            "to mask it: use sdpa or flash_attention_2, or remove ds.packing_samples"
        )


def universal_is_whole(config: Config) -> Iterator[str]:
    """A universal checkpoint holds all that training goes on from."""
    yield from universal_problems(config)


def universal_problems(config: Config | SupervisedConfig) -> Iterator[str]:
    """fp16 has a loss scale besides, which each form of DeepSpeed's optimizers keeps in its own way."""
    if config.ds.use_universal_ckpt and config.ds.param_dtype == "fp16":
        yield (
            "ds.use_universal_ckpt does not save the loss scale of ds.param_dtype='fp16': use bf16 or fp32, or remove "
            "ds.use_universal_ckpt"
        )


def adapters_are_whole(config: Config) -> Iterator[str]:
    """Adapters, and what stands in 4 bits below them."""
    yield from adapter_problems(config)
    if config.ds.lora.rank and config.ds.lora.dropout:
        yield (
            f"ds.lora.dropout={config.ds.lora.dropout} makes the log-probs of the same tokens differ between two passes, so "
            "that no ratio of them is 1 before a step: set it to 0 (supervised runs may have it)"
        )
    if config.ds.load_in_4bit and config.data.max_images_per_prompt:
        yield (
            f"ds.load_in_4bit is for models that read text only, and data.max_images_per_prompt="
            f"{config.data.max_images_per_prompt}: remove ds.load_in_4bit"
        )


def adapter_problems(config: Config | SupervisedConfig) -> Iterator[str]:
    """What is wrong with adapters, whatever is trained by them."""
    ds = config.ds
    if ds.lora.rank and ds.tensor_parallel_size > 1:
        yield (
            f"ds.lora.rank={ds.lora.rank} gives adapters to whole layers, and ds.tensor_parallel_size="
            f"{ds.tensor_parallel_size} divides them: use ds.zero_stage=3 for models that do not fit on one GPU"
        )
    if ds.lora.rank and not ds.lora.target_modules:
        yield f"ds.lora.rank={ds.lora.rank} with ds.lora.target_modules=[] trains nothing: name layers, or use all-linear"
    if not ds.load_in_4bit:
        return
    if not ds.lora.rank:
        yield "ds.load_in_4bit freezes the model, and ds.lora.rank=0 trains nothing else: set ds.lora.rank"
    if ds.param_dtype != "bf16":
        yield f"ds.load_in_4bit computes in bf16, not in ds.param_dtype={ds.param_dtype!r}: set it to bf16"
    if ds.zero_stage == 3:
        yield "ds.load_in_4bit keeps the packed weights whole, which ds.zero_stage=3 would divide: use 2"


def steps_divide(config: Config) -> Iterator[str]:
    """A rollout is a whole number of optimizer steps, and a step a whole number of rows per rank."""
    samples, step = config.samples_per_iteration, config.samples_per_step
    if samples % step:
        yield (
            f"train.batch_size={step} does not divide rollout.batch_size × rollout.n_samples_per_prompt = {samples}: "
            "choose a divisor"
        )
    for name, model in (("actor", config.actor), ("critic", config.critic)):
        together = config.ds.ranks_together
        groups = max(model.world_size // together, 1)
        if step % groups and (name == "actor" or config.needs_critic):
            each = "ranks" if together == 1 else f"groups of {together} ranks"
            yield (
                f"train.batch_size={step} (default: the whole rollout) does not divide over {groups} {each} "
                f"({name}.num_nodes × {name}.num_gpus_per_node): choose a multiple of them"
            )


def filtering_can_keep(config: Config) -> Iterator[str]:
    """A filter that rejects whatever it sees is a mistake."""
    low, high = config.algo.dynamic_filtering_range
    if low >= high:
        yield f"algo.dynamic_filtering_range=({low}, {high}) is empty: give (low, high)"
    n = config.rollout.n_samples_per_prompt
    if config.algo.dynamic_filtering_enable and n < 2:
        yield (
            "algo.dynamic_filtering_enable keeps groups whose scores differ, but "
            f"rollout.n_samples_per_prompt={n}: set it to 2 or more"
        )


def rounds_can_fill(config: Config) -> Iterator[str]:
    """With nothing rejected, the rounds of an iteration give a whole batch; so the plan of a run is an upper bound."""
    size, rounds = config.generate_batch_size, config.algo.dynamic_filtering_max_rounds
    if size * rounds < config.rollout.batch_size:
        yield (
            f"algo.dynamic_filtering_max_rounds={rounds} of rollout.vllm_generate_batch_size={size} prompts never fill "
            f"rollout.batch_size={config.rollout.batch_size}: raise one of the first two"
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
    budget, ranks = config.train.max_tokens_per_gpu, config.ds.ranks_per_row
    if config.train.dynamic_batch_enable and ranks * budget < total:
        yield f"train.max_tokens_per_gpu={budget} cannot hold one sample of data.max_len={total}: raise it"
    budget_rollout = config.rollout.max_tokens_per_gpu or budget
    longest = total + config.algo.advantage.bootstrap_truncated  # the value after the last token is asked for too
    if config.train.dynamic_batch_enable and total <= ranks * budget and ranks * budget_rollout < longest:
        yield f"rollout.max_tokens_per_gpu={budget_rollout} cannot hold one sample of {longest} tokens: raise it"


def reward_source_exists(config: Config) -> Iterator[str]:
    """Something must score the answers: functions, servers and a trained model, in any combination."""
    reward = config.reward
    if not config.has_reward_source and config.execution_mode in ("single_turn", "tools"):  # other agents may reward
        yield (
            "no reward source: set reward.functions, reward.remote_url or reward.model_name_or_path (see docs/rewards.md)"
        )
    files = [url for url in reward.remote_url if "://" not in url]
    if files and (reward.functions or len(reward.remote_url) > 1):
        yield (
            f"reward.remote_url={','.join(reward.remote_url)} names a file beside other sources: list the file in "
            "reward.functions, with its weight"
        )
    yield from server_problems(reward)
    if reward.clip_range is not None and reward.clip_range[0] >= reward.clip_range[1]:
        yield f"reward.clip_range={reward.clip_range} is empty: give (low, high)"
    buffer = reward.overlong_buffer_len
    if buffer is not None and buffer > config.rollout.max_new_tokens:
        limit = config.rollout.max_new_tokens
        yield f"reward.overlong_buffer_len={buffer} is longer than rollout.max_new_tokens={limit}: lower it"


def server_problems(reward: RewardConfig) -> Iterator[str]:
    """What is wrong with the reward servers' URLs, and with settings that nothing reads."""
    urls = [url for url in reward.remote_url if "://" in url]
    for url in urls:
        if "@" not in url and not is_http_url(url):  # one with a password in it is not to be repeated
            yield f"reward.remote_url={url}: use http://host:port/path or https://host/path"
    if not urls and reward.remote_token_env is not None:
        yield f"reward.remote_token_env={reward.remote_token_env!r} without a URL in reward.remote_url: remove it"


def is_http_url(url: str) -> bool:
    """True if a connection can be made with it."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number, or the brackets of an IPv6 address do not match
        return False


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


def best_metric_exists(config: Config) -> Iterator[str]:
    """The best checkpoint is found by an evaluation; the first one, before any training, says which metrics there are."""
    yield from best_metric_problems(config)
    key, evaluation = config.ckpt.best_metric_key or "", config.eval
    if (match := re.fullmatch(r"eval/(.+/)?pass@(\d+)(_stderr)?", key)) is not None:
        reported = evaluation.pass_k or sorted({1, evaluation.n_samples_per_prompt})
        if int(match[2]) not in reported:
            listed = ", ".join(f"pass@{k}" for k in reported)
            yield f"ckpt.best_metric_key={key!r}: the evaluation reports {listed}: use one of them, or set eval.pass_k"


def best_metric_problems(config: Config | SupervisedConfig) -> Iterator[str]:
    """What is wrong with ``ckpt.best_metric_key``, whatever is trained."""
    ckpt = config.ckpt
    if ckpt.best_metric_key is None:
        if ckpt.best_metric_mode != default_at(config, "ckpt.best_metric_mode"):
            yield f"ckpt.best_metric_mode={ckpt.best_metric_mode!r} without ckpt.best_metric_key: name the metric, or remove it"
        return
    if not config.eval.dataset:
        yield f"ckpt.best_metric_key={ckpt.best_metric_key!r} without eval.dataset: name the held-out data"
    if not ckpt.best_metric_key.startswith("eval/"):
        yield (
            f"ckpt.best_metric_key={ckpt.best_metric_key!r} is no metric of an evaluation: their names begin with 'eval/', "
            "such as eval/score_mean"
        )


def run_models_are_named(config: Config) -> Iterator[str]:
    """A ``run:`` name has one of its forms. Whether there is such a checkpoint is looked up when the run starts."""
    yield from run_model_problems(config, *(f"{section}.model_name_or_path" for section in MODELS))


def run_model_problems(config: Config | SupervisedConfig, *keys: str) -> Iterator[str]:
    """What is wrong with names of models."""
    for key in keys:
        name = value_at(config, key)
        if name is not None and is_run_model(name):
            try:
                parse_run_model(name)
            except ConfigError as error:
                yield f"{key}: {error}"


def replay_is_complete(config: Config) -> Iterator[str]:
    """A replay has a source and no engine. What may differ from the source is looked at when the run starts."""
    replay = config.replay
    if replay.source is None:
        for key in ("replay.iterations", "replay.rewards"):
            if value_at(config, key) != default_at(config, key):
                yield f"{key}={value_at(config, key)!r} without replay.source: name the run with the trajectories"
        return
    if "@" in urlsplit(replay.source).netloc:
        yield (
            "replay.source is a URL with a user or password in it, and the configuration is stored and shown: remove them, and "
            "use the environment"
        )
    if replay.iterations is not None and replay.iterations[0] > replay.iterations[1]:
        yield f"replay.iterations={list(replay.iterations)} are none: give [first, last]"
    if config.eval.dataset:
        yield (
            "eval.dataset needs an engine to answer it, and a replay has none: remove it, and evaluate a checkpoint of the "
            "replay with a run of its own (actor.model_name_or_path=run:ID)"
        )


def registered_model_is_named(config: Config) -> Iterator[str]:
    """MLflow's own limits: else the run would fail as it registers its first checkpoint."""
    yield from registered_model_problems(config)


def registered_model_problems(config: Config | SupervisedConfig) -> Iterator[str]:
    """What is wrong with ``logger.mlflow_model``, whatever is trained."""
    model = config.logger.mlflow_model
    if model is not None and (not model.strip() or len(model) > 256 or any(mark in model for mark in "/:'\"")):
        yield f"logger.mlflow_model={model!r} cannot name a registered model: use up to 256 characters without / : ' and \""


def metrics_have_a_place(config: Config) -> Iterator[str]:
    """A logger that could not write, or a key that does nothing."""
    yield from logger_problems(config)


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
    if "@" in urlsplit(config.data.only_rows or "").netloc:
        yield "data.only_rows is a URL with a user or password in it, and the configuration is stored and shown: remove them"
    for url in config.reward.remote_url:
        if "@" in url or any(names_credential(name) for name, _ in parse_qsl(url.partition("?")[2])):
            yield (
                "reward.remote_url has a URL with a user, a password or a key in it, and the configuration is stored and "
                "shown: remove them, and name the variable that holds the servers' token in reward.remote_token_env"
            )


def logger_problems(config: Config | SupervisedConfig) -> Iterator[str]:
    """What is wrong with where metrics go."""
    logger = config.logger
    if "://" in (logger.tensorboard_dir or ""):
        yield (
            f"logger.tensorboard_dir={logger.tensorboard_dir!r}: event files grow line by line, which only a file system can: "
            "name a folder"
        )
    wandb = logger.wandb
    if wandb.project is None and wandb.model_copy(update={"key": None}) != type(wandb)():
        yield "logger.wandb.org, .group and .mode do nothing without logger.wandb.project: name the project, or remove them"
    if logger.prometheus_port is None and logger.prometheus_host != default_at(config, "logger.prometheus_host"):
        yield (
            f"logger.prometheus_host={logger.prometheus_host!r} without logger.prometheus_port: set the port, or 0 "
            "for any free one"
        )


def credential_problems(config: Config | SupervisedConfig) -> Iterator[str]:
    """The message names the key, never its value."""
    if config.logger.wandb.key is not None:
        yield (
            "logger.wandb.key is a credential, and the configuration is stored and shown: remove it, and set WANDB_API_KEY in "
            "the environment of the run's process"
        )
    for key in credential_keys(config.storage.options, "storage.options"):
        yield (
            f"{key} is a credential, and the configuration is stored and shown: remove it, and give it to the processes "
            "through the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, ... or an instance role)"
        )
    for key in secret_values(config.model_dump(mode="json")):
        yield (
            f"{key} holds a secret that an environment variable of this process has too, and the configuration is stored and "
            "shown: let the code that needs it read the variable (docs/security.md#secrets)"
        )
    for key in URLS:
        if "@" in urlsplit(value_at(config, key) or "").netloc:
            yield (
                f"{key} is a URL with a user or password in it, and the configuration is stored and shown: remove them, and "
                "use the environment (MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD, AWS_ACCESS_KEY_ID, ...)"
            )


def secret_values(tree: Any, prefix: str = "") -> Iterator[str]:
    """Dotted keys, at any depth, in whose values stands a secret that this process knows."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from secret_values(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from secret_values(value, f"{prefix}[{index}]")
    elif isinstance(tree, str) and holds_secret(tree):
        yield prefix


def credential_keys(tree: Any, prefix: str) -> Iterator[str]:
    """Dotted keys, at any depth, whose names say that they hold a credential."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            path = f"{prefix}.{key}"
            if names_credential(str(key)):
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
    yield from training_misfits(config, device)


def training_misfits(config: Config | SupervisedConfig, device: str) -> Iterator[str]:
    """What of the settings of training does not exist on ``device``."""
    if device == "gpu":
        return
    if config.ds.attn_implementation.startswith("flash"):
        yield f"ds.attn_implementation={config.ds.attn_implementation!r} needs a GPU: use 'sdpa' on CPU"
    if config.ds.param_dtype == "fp16":
        yield "ds.param_dtype='fp16' needs a GPU: use 'bf16' or 'fp32' on CPU"
    if config.ds.load_in_4bit:
        yield "ds.load_in_4bit needs a CUDA GPU: remove it on CPU"
    if config.ds.use_liger_kernel:
        yield "ds.use_liger_kernel needs a GPU: remove it on CPU"


RULES: tuple[Callable[[Config], Iterator[str]], ...] = (
    algorithms_exist,
    critic_is_wanted,
    critic_keys_have_a_critic,
    group_estimators_need_groups,
    gamma_is_one,
    freezing_leaves_iterations,
    muon_is_not_clipped,
    packed_samples_stay_apart,
    universal_is_whole,
    adapters_are_whole,
    steps_divide,
    filtering_can_keep,
    rounds_can_fill,
    lengths_fit,
    reward_source_exists,
    kl_loss_needs_reference,
    correction_range,
    probabilities_match,
    templates_agree,
    evaluation_is_complete,
    best_metric_exists,
    run_models_are_named,
    replay_is_complete,
    registered_model_is_named,
    metrics_have_a_place,
    steps_are_positive,
    backends_match_device,
    no_credentials,
    *AGENT_RULES,
    *VISION_RULES,
    *PIPELINE_RULES,
    *PARALLEL_RULES,
)
