"""Every key of a run that trains by rewards, with its meaning under it. The paths are those that OpenRLHF users know
(docs/from-openrlhf.md).

One class a section; the sections meet in ``Config``. Bounds are in the types, rules across fields in ``rules.py``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, SecretStr, model_validator

from rlhf_core.config import rules
from rlhf_core.config.agent_rules import ExecutionMode, modes_of
from rlhf_core.config.base import FloatList, Fraction, NonNegativeFloat, NonNegativeInt, Section, StringList
from rlhf_core.config.trained import AdamConfig, BatchedTrainConfig, DeepSpeedConfig, HeldOutConfig, TrainedModelConfig

# --- models and their training -------------------------------------------------------------------------------------


class ActorConfig(TrainedModelConfig):
    """The policy that is trained."""

    model_name_or_path: str = Field(min_length=1)
    """A Hugging Face id, a folder, ``builtin:tiny`` (a random 2-layer byte-level model made by this project), or
    ``run:ID``, ``run:ID@best``, ``run:ID@12``: the newest, best or named checkpoint of a run below ``storage.root``, or of
    one anywhere by its URL (``run:s3://bucket/runs/ID@best``). Which one that is, is settled when the run first starts."""
    policy_loss_type: str = "ppo"
    """The policy loss: ppo, gspo, cispo, or ``path.py:name`` (docs/algorithms.md)."""
    eps_clip: PositiveFloat = 0.2
    """Clip range of the probability ratio on both sides."""
    eps_clip_low_high: tuple[PositiveFloat, PositiveFloat] | None = None
    """Asymmetric clip range (low, high); replaces ``eps_clip``."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Upper bound c of the ratio's effect where the advantage is negative."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus, from the temperature-scaled distribution that was sampled."""
    aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of a mixture-of-experts model's balancing loss."""
    loss_agg_mode: Literal["token", "sample", "constant_length"] | None = None
    """How token losses become one number; default: token, ``constant_length`` with dr_grpo, ``sample`` with gspo."""
    freeze_visual_encoder: bool = False
    """Train only the language side of a vision-language model, of the critic too."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """(eps_low, eps_high)."""
        return self.eps_clip_low_high or (self.eps_clip, self.eps_clip)


class CriticConfig(TrainedModelConfig):
    """The value network of PPO: a backbone with one number a token."""

    enable: bool | None = None
    """Train a critic; default: with the estimator gae. An estimator from a file that needs values sets it."""
    model_name_or_path: str | None = None
    """Backbone of the critic, as ``actor.model_name_or_path``: of a reward model, whose head it then starts from, or of a
    language model, with which its values start at 0; default: ``reward.model_name_or_path``, else the policy's."""
    adam: AdamConfig = AdamConfig(lr=9e-6)
    """Settings of AdamW."""
    value_clip: PositiveFloat = 0.5
    """Clip range of the value loss."""
    freezing_steps: NonNegativeInt = 0
    """Iterations at the start in which only the critic is trained."""


class RefConfig(Section):
    """The frozen reference model; exists only if ``algo.kl.init_coef > 0``."""

    model_name_or_path: str | None = None
    """As ``actor.model_name_or_path``; default: the policy's starting point."""
    num_nodes: PositiveInt = 1
    """Nodes its ranks are spread over."""
    num_gpus_per_node: PositiveInt = 1
    """Ranks per node."""
    offload: bool = False
    """Keep its weights in host memory between forward passes."""


# --- generation ------------------------------------------------------------------------------------------------------


class VllmConfig(Section):
    """The rollout engines."""

    num_engines: PositiveInt = 1
    """Engines; each takes ``tensor_parallel_size`` GPUs."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs per engine."""
    dtype: Literal["auto", "bf16", "fp32", "fp16"] = "auto"
    """Type of the engine's weights; ``auto``: as ``ds.param_dtype``."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of GPU memory an engine may take."""
    cpu_kv_cache_gib: PositiveFloat = 1.0
    """KV cache of an engine on CPU, GiB."""
    max_num_seqs: PositiveInt = 256
    """Sequences an engine decodes at once."""
    max_model_len: PositiveInt | None = None
    """Context of the engine, tokens; default: ``data.max_len``."""
    enforce_eager: bool = False
    """No CUDA graphs."""
    enable_prefix_caching: bool = True
    """Share the KV cache of equal prefixes (reset at every weight sync)."""
    enable_sleep: bool = False
    """Free the engine's GPU memory while training works, with ``train.colocate_all``."""
    sleep_level: Literal[1, 2] = 1
    """What a sleeping engine keeps: 1, its weights in host memory; 2, nothing: the weight sync brings them back. The KV cache
    goes in either case."""
    sync_backend: Literal["auto", "shm", "nccl", "ipc"] = "auto"
    """How weights reach the engines; ``auto``: shm on CPU, ipc when colocated, else nccl."""
    sync_timeout: PositiveFloat = 600
    """Seconds a weight sync may take before it is an error."""
    request_timeout: PositiveFloat = 1800
    """Seconds one completion may take before its sample fails."""


class RolloutConfig(Section):
    """What is sampled in an iteration."""

    batch_size: PositiveInt = 128
    """Prompts per iteration."""
    n_samples_per_prompt: PositiveInt = 8
    """Samples per prompt: the size of a group."""
    micro_batch_size: PositiveInt = 8
    """Rows per forward pass when log-probs are recomputed."""
    max_tokens_per_gpu: PositiveInt | None = None
    """Token budget of such a pass, with ``train.dynamic_batch_enable``."""
    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Sampling temperature, at most 2 (vLLM's limit); the trainer divides its logits by the same number."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling. Below 1 the engine's log-probs are renormalised and kept out of the mismatch correction."""
    top_k: NonNegativeInt = 0
    """Sample among the k likeliest tokens; 0: off."""
    max_new_tokens: PositiveInt = 1024
    """Tokens per answer."""
    min_new_tokens: NonNegativeInt = 0
    """No end of sequence before this many tokens. The engine renormalises for it, as with ``top_p``."""
    stop: tuple[str, ...] = ()
    """Stop strings. The sampled text up to and including the match is trained."""
    ignore_eos: bool = False
    """Always sample ``max_new_tokens`` tokens."""
    vllm_generate_batch_size: PositiveInt | None = None
    """Prompts generated at a time, in rounds until the batch is full; default: ``batch_size``. More than that is
    over-sampling: groups that the batch does not need are kept, durable, and trained in the next iterations."""
    on_error: Literal["keep_group", "drop_group", "fail"] = "keep_group"
    """A failed sample: its group goes on with the rest, is dropped, or fails the run."""
    max_consecutive_failures: PositiveInt = 32
    """So many samples that fail in a row, in the order in which they were drawn, stop the run with their cause."""
    publish_groups: PositiveInt = 8
    """A shard is published once so many groups have finished; those that finish together share one. Also every few seconds."""
    max_age: NonNegativeInt | None = None
    """Versions that a group which was kept for a later batch may be behind the policy that trains on it; one that is older by
    then is sampled again. Default: any. With ``train.async_enable`` it is ``train.async_queue_size``."""


# --- data and rewards ------------------------------------------------------------------------------------------------


class DataConfig(Section):
    """Where prompts come from and how they become tokens."""

    prompt_dataset: StringList = Field(min_length=1)
    """Comma list of: .json, .jsonl, .csv, .parquet, .arrow files; a folder of ``save_to_disk``; a hub id;
    ``path.py:function`` (optionally ``path.py:function?key=value&...``), which returns or yields rows; or ready-made
    environments, ``env:collection/name?key=value&...`` (docs/agents.md)."""
    prompt_split: str = "train"
    """Split of a Hugging Face dataset."""
    prompt_probs: FloatList | None = None
    """Mixing weights of the datasets; default: all rows of all."""
    input_key: str = "input"
    """Column of the prompt: text, or a list of chat messages."""
    label_key: str | None = "label"
    """Column of the label, any JSON type; null: no label."""
    id_key: str | None = None
    """Column of the row id; default: the datasource and the row number."""
    image_key: str = "images"
    """Column of the prompt's images: one or a list of paths, URLs, data URLs, base64, bytes, or Hugging Face images."""
    max_images_per_prompt: NonNegativeInt = 0
    """Most images of one prompt; a row with more is refused. 0: text only, also where the model could see."""
    image_max_bytes: PositiveInt = 32 * 2**20
    """Largest file or download of one image."""
    image_max_pixels: int = Field(default=64 * 2**20, gt=0, le=170 * 2**20)
    """Largest image, width times height, before its pixels are unpacked."""
    image_timeout: PositiveFloat = 30
    """Seconds the download of one image may take."""
    tools_key: str = "tools"
    """Column of tool schemas for the chat template, used where present."""
    apply_chat_template: bool = False
    """Render with the tokenizer's chat template."""
    tokenizer_chat_template: str | None = None
    """A template that replaces the tokenizer's own."""
    system_prompt: str | None = None
    """Put before plain-string prompts when the chat template is applied."""
    input_template: str | None = None
    """Plain-text template with exactly one ``{}`` for the prompt, instead of a chat template."""
    max_len: PositiveInt = 2048
    """Prompt plus answer, tokens."""
    only_rows: str | None = None
    """A file, or a URL, with a JSON list of row ids: only these rows are used. Each must be there."""
    max_samples: PositiveInt | None = None
    """Use only the first rows of each dataset, of those in ``only_rows``."""
    overlong: Literal["drop", "error"] = "drop"
    """A prompt that leaves no room for an answer is dropped and counted, or refused."""
    disable_fast_tokenizer: bool = False
    """Use the slow tokenizer."""


class RewardFunctionConfig(Section):
    """One reward function."""

    use: str = Field(min_length=1)
    """A built-in (exact_match, last_number, digits, math, regex, length), ``path.py``, ``path.py:function``, or
    ``package.module:function``."""
    weight: float = 1.0
    """Its share in the sum."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    name: str | None = None
    """Its name in the metrics; default: derived from ``use``."""


class RewardConfig(Section):
    """How answers are scored."""

    functions: tuple[RewardFunctionConfig, ...] = ()
    """Reward functions; their weighted sum is the reward, each part is logged."""
    remote_url: StringList = ()
    """A ``.py`` file with ``reward_func(queries, prompts, labels)``, as in OpenRLHF; or URLs of reward servers, which
    share the samples: each request goes to one of them, and to the next if that one fails."""
    remote_weight: float = 1.0
    """Weight of the servers' reward in the sum."""
    remote_batch_size: PositiveInt = 1
    """Samples per request. Servers that batch by themselves (``rlhf serve-reward``) need no more than 1."""
    remote_concurrency: PositiveInt = 64
    """Requests under way at once, over all servers."""
    remote_token_env: str | None = None
    """Name of the environment variable with the servers' bearer token; the token itself is never stored."""
    model_name_or_path: str | None = None
    """A trained reward model (a sequence classifier with one output), as ``actor.model_name_or_path``."""
    model_weight: float = 1.0
    """Weight of the reward model's score in the sum."""
    model_num_ranks: PositiveInt = 1
    """Processes that hold the reward model, each the whole of it, one GPU each."""
    model_micro_batch_size: PositiveInt = 8
    """Rows per forward pass of the reward model."""
    model_max_len: PositiveInt | None = None
    """Longest text the reward model reads, tokens; default: its own limit. A longer one is an error of its sample."""
    num_workers: PositiveInt = 2
    """Processes that run reward functions."""
    batch_size: PositiveInt = 32
    """Samples per call of a batch-wise function."""
    timeout: PositiveFloat = 60
    """Seconds that a call of a function, a server or the reward model may take once it started; then its samples are
    ``timed_out``. A function's process is killed."""
    on_error: Literal["exclude", "fail"] = "exclude"
    """A sample without a reward is left out of training, or fails the run."""
    max_retries: NonNegativeInt = 0
    """Further attempts for a call that timed out, or whose process died."""
    clip_range: tuple[float, float] | None = None
    """Raw rewards are clipped to this range, before any shaping."""
    overlong_buffer_len: PositiveInt | None = None
    """Last tokens of ``rollout.max_new_tokens`` in which the penalty grows."""
    overlong_penalty_factor: NonNegativeFloat = 1.0
    """The penalty at the limit."""
    stop_properly_penalty_coef: float | None = None
    """On truncated samples: >= 0 multiplies positive rewards, < 0 replaces the reward."""
    normalize_enable: bool = False
    """Each source's rewards are shifted and scaled by the running mean and standard deviation of all it gave so far."""


# --- algorithm -------------------------------------------------------------------------------------------------------


class AdvantageConfig(Section):
    """From rewards to advantages."""

    estimator: str = "group_norm"
    """gae: PPO; reinforce: REINFORCE++; reinforce_baseline: REINFORCE++-baseline; rloo; group_norm: GRPO; dr_grpo; or
    ``path.py:name`` (docs/algorithms.md)."""
    gamma: Fraction = 1.0
    """Discount per action token (gae, reinforce)."""
    lambd: Fraction = 1.0
    """GAE's lambda."""
    no_std_norm: bool = False
    """Whitening only centres."""
    bootstrap_truncated: bool = False
    """A truncated answer's last value is bootstrapped (gae)."""
    is_correction_enable: bool | None = None
    """Correct for the mismatch between the engine's and the trainer's log-probs. Default: where older versions than the one
    that is trained may speak (``train.async_enable`` with ``train.async_queue_size`` > 0)."""
    is_correction_type: Literal["tis", "icepop", "seq-mask-tis"] = "tis"
    """How: clamp the weight, drop tokens outside the range, or also drop whole samples."""
    is_correction_threshold: tuple[NonNegativeFloat, PositiveFloat] = (0.5, 5.0)
    """[low, high] of the weight."""


class KlConfig(Section):
    """Keeping near the reference model."""

    init_coef: NonNegativeFloat = 0.0
    """Weight of the KL term; 0: no reference model is made."""
    use_loss: bool = False
    """As a loss term instead of a reward penalty."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """The per-token estimate."""
    target: PositiveFloat | None = None
    """Target KL of the adaptive controller; default: the coefficient is fixed."""
    horizon: PositiveFloat = 10000
    """Time constant of the adaptive controller, samples."""


class AlgoConfig(Section):
    """The algorithm."""

    advantage: AdvantageConfig = AdvantageConfig()
    """From rewards to advantages."""
    kl: KlConfig = KlConfig()
    """Keeping near the reference model."""
    dr_grpo_length: PositiveInt | None = None
    """Constant length of dr_grpo's loss; default: ``rollout.max_new_tokens``."""
    dynamic_filtering_enable: bool = False
    """Replace groups whose rewards are outside the range or all equal."""
    dynamic_filtering_range: tuple[float, float] = (0.0, 1.0)
    """A group is kept if its mean score is strictly inside."""
    dynamic_filtering_max_rounds: PositiveInt = 10
    """Rounds of generation in one iteration, the first included. With partial rollout, whose rounds end early: as many groups
    as so many whole ones have."""
    dynamic_filtering_on_limit: Literal["train", "stop"] = "train"
    """After the last round: train the short batch, or stop the run. A batch without any group stops it in either case."""


# --- execution mode ---------------------------------------------------------------------------------------------------


class AgentServerConfig(Section):
    """The OpenAI-compatible server in front of the engines, for agents written with any OpenAI client."""

    host: str = "127.0.0.1"
    """Address it listens on; ``0.0.0.0`` for agents on other machines. Every call needs its session's key."""
    max_calls: PositiveInt = 64
    """Calls of one episode."""
    history: Literal["exact", "template"] = "exact"
    """What the model sees of its own earlier turns: exactly what it said, or what the chat template makes of them (which may
    strip its thinking; the episode then falls into several segments)."""
    tool_parser: str | None = "hermes"
    """vLLM's parser of tool calls; null: calls with tools are answered with plain text."""
    reasoning_parser: str | None = None
    """vLLM's parser of thinking; null: it stays in the text."""
    image_hosts: StringList = ()
    """Hosts in this network from which images of messages may be fetched; public ones always may."""
    train_constrained: bool = False
    """Train on answers whose tokens a grammar, a forced tool call or a bias chose together with the policy."""


class SandboxConfig(Section):
    """Where the tool ``python`` runs code: a process for each call, without network, other processes or credentials."""

    memory_mib: int = Field(default=512, ge=64)
    """Address space of the process, MiB; beyond it the code gets a MemoryError."""
    disk_mib: PositiveInt = 8
    """Files it may write, MiB; they are deleted after the call."""
    packages: bool = False
    """Installed packages may be imported, not only the standard library; the code can then read all of them."""
    open_files: bool = False
    """Run also where the kernel has no Landlock: the code can then read and write what the user of the run can,
    the environment of its processes included."""


class AgentConfig(Section):
    """Episodes of several turns (docs/agents.md): which agent plays them is said by ``train.agent_func_path``,
    ``agent.tools``, ``agent.command``, ``agent.url`` or an ``env:`` dataset."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the agent's class, or of ``run_agent``."""
    max_turns: PositiveInt = 16
    """Turns of the policy in one episode."""
    max_turn_tokens: PositiveInt | None = None
    """Tokens of one turn; default: ``rollout.max_new_tokens``, which all turns of an episode share."""
    step_timeout: PositiveFloat = 60
    """Seconds one ``reset`` or ``step`` may take; then its process is killed and its sample fails."""
    episode_timeout: PositiveFloat = 1800
    """Seconds an OpenAI-API agent may take for one episode."""
    max_processes: PositiveInt = 256
    """Environments or agents that run at once, each in a process of its own; further episodes wait. Fewer than
    ``vllm.max_num_seqs`` leave the engines idle. One forked from a file takes 3 to 9 MB of its own and what its episode
    loads; a program (``agent.command``) all that it needs."""
    tools: StringList = ()
    """Tools that the policy may call: ``python`` (a sandbox), or ``path.py:function`` with type hints and a docstring."""
    tool_format: Literal["hermes", "json"] = "hermes"
    """How the policy writes a tool call: ``<tool_call>{...}</tool_call>``, or the bare JSON object."""
    tool_timeout: PositiveFloat = 10
    """Seconds one tool call may take; then the policy is told so, and the episode goes on."""
    tool_result_chars: int = Field(default=4000, ge=100)
    """Longest result of a tool, characters; of a longer one the beginning and the end are kept."""
    tool_max_calls: PositiveInt = 4
    """Tool calls in one turn; the policy is told that those beyond were not run."""
    sandbox: SandboxConfig = SandboxConfig()
    """Of the tool ``python``."""
    command: StringList = ()
    """An agent as a program, with its arguments: finds OPENAI_BASE_URL and OPENAI_API_KEY in its environment."""
    url: StringList = ()
    """Agents elsewhere on the network: each episode is posted to one of these URLs."""
    server: AgentServerConfig = AgentServerConfig()
    """The OpenAI-compatible server."""


# --- the run ---------------------------------------------------------------------------------------------------------


class TrainConfig(BatchedTrainConfig):
    """How long and in what order."""

    num_episodes: PositiveInt = 1
    """Passes through the prompts."""
    max_iterations: PositiveInt | None = None
    """Stop after this many iterations."""
    max_epochs: PositiveInt = 1
    """Passes over each iteration's samples."""
    batch_size: PositiveInt | None = None
    """Samples per optimizer step, over all ranks; default: the whole rollout, so one step an iteration."""
    seed: NonNegativeInt = 42
    """Of the prompt order, of every sample and of the order of minibatches."""
    agent_func_path: str | None = None
    """A Python file with an ``AgentExecutor`` or an ``AgentInstance`` (as in OpenRLHF), or with ``run_agent(prompt, label,
    client)`` for agents written with an OpenAI client."""
    async_enable: bool = False
    """Overlap rollout and training: iterations are flow runs that overlap (docs/pipelines.md)."""
    async_queue_size: NonNegativeInt = 1
    """With ``async_enable``: versions that any token may be behind the policy that trains on it. Rollout k starts once version
    k - this exists. 0 is on-policy."""
    partial_rollout_enable: bool = False
    """With ``async_enable``: a weight sync pauses the requests in flight, which go on with the new weights, instead of waiting
    for them to end. With ``rollout.vllm_generate_batch_size`` above ``rollout.batch_size`` an iteration closes when its batch
    is full, and what is unfinished goes on in the next."""
    partial_rollout_kv: Literal["recompute", "keep"] = "recompute"
    """The KV cache of a paused request: computed again with the new weights, or kept as the old ones left it."""
    partial_rollout_mask_old: bool = False
    """Train only on the tokens of a sample that the last of its versions spoke; those before that weight sync are context."""
    allow_uncorrected: bool = False
    """Let ``algo.advantage.is_correction_enable=false``, or sampling that cannot be corrected (``rollout.top_p``, ``top_k``,
    ``min_new_tokens``), stand where older versions may speak. The gradient is biased then."""
    colocate_all: bool = False
    """All models and engines share the same GPUs, and take turns."""
    colocate_actor_ref: bool = False
    """Policy and reference model share GPUs."""
    colocate_critic_reward: bool = False
    """Critic and reward model share GPUs."""


class EvalConfig(HeldOutConfig):
    """Scoring a policy version on held-out prompts."""

    n_samples_per_prompt: PositiveInt = 1
    """Answers per prompt: the n of pass@k."""
    pass_k: tuple[PositiveInt, ...] = ()
    """k of the pass@k that are reported; default: 1 and n."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Sampling temperature, at most 2; 0: greedy."""
    success_threshold: float = 1.0
    """A score of at least this is a success."""


class CheckpointConfig(Section):
    """Snapshots of the training state, below ``storage.root``."""

    save_steps: int = Field(default=-1, ge=-1)
    """A checkpoint every so many iterations, besides the one at the end; -1: only at the end."""
    save_hf: bool = True
    """Also export the model as a Hugging Face folder."""
    max_num: PositiveInt | None = None
    """Keep only the newest so many. The best one is kept besides."""
    max_mem: PositiveFloat | None = None
    """Keep only the newest that fit into so many GiB, the best one included. The newest and the best stay in any case."""
    best_metric_key: str | None = None
    """Evaluation metric that marks the best checkpoint, such as ``eval/score_mean``: a version that is better than all
    evaluated before is saved, and kept. The model before training does not compete."""
    best_metric_mode: Literal["max", "min"] = "max"
    """Whether more or less of it is better. On a tie the earlier version stays the best."""


class WandbConfig(Section):
    """Weights & Biases."""

    key: SecretStr | None = None
    """Refused, as any credential in a configuration: the key is read from $WANDB_API_KEY."""
    project: str | None = None
    """Project; with it the run's metrics go there."""
    org: str | None = None
    """Team or user whose project it is; default: the key's own."""
    group: str | None = None
    """Group of runs within the project."""
    mode: Literal["online", "offline"] = "online"
    """offline: only files, below $WANDB_DIR (else $RLHF_HOME), for ``wandb sync``."""


class ReplayConfig(Section):
    """Training on what another run sampled, instead of sampling: what ``rlhf replay`` fills in (docs/replay.md)."""

    source: str | None = None
    """The run with the trajectories: its id below ``storage.root``, or its URL. null: this run samples for itself."""
    iterations: tuple[NonNegativeInt, NonNegativeInt] | None = None
    """First and last iteration of the source to train on; default: all that have rewards when the replay first starts."""
    rewards: Literal["source", "anew"] = "source"
    """Take the rewards that the source gave, or score its answers again."""


class LoggerConfig(Section):
    """Where metrics go."""

    mlflow_uri: str | None = None
    """MLflow tracking URI; default: $MLFLOW_TRACKING_URI; neither: no tracker."""
    mlflow_experiment: str = "rlhf"
    """MLflow experiment."""
    mlflow_model: str | None = None
    """A model of MLflow's registry: every checkpoint with an exported model becomes a version of it (docs/retraining.md). One
    for all runs of a task, so that its alias ``best`` compares like with like. Default: none."""
    tensorboard_dir: str | None = None
    """Folder of TensorBoard's event files; a run writes to ``{tensorboard_dir}/{run_id}/``."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""
    prometheus_port: int | None = Field(default=None, ge=0, le=65535)
    """Port at which the run's process tells Prometheus how it goes (docs/observability.md); 0: any free one, which the file
    ``$RLHF_HOME/prometheus/{run_id}.json`` names. Default: nobody listens."""
    prometheus_host: str = "127.0.0.1"
    """Address it listens on."""
    log_format: Literal["text", "json"] | None = None
    """Log lines of the run's processes: text, or JSON objects; default: $RLHF_LOG_FORMAT, else text."""


class StorageConfig(Section):
    """Where a run keeps its log."""

    root: str = ".rlhf/runs"
    """Any fsspec URL or folder; everything of a run lies under ``{root}/{run_id}/``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the fsspec file system, such as ``s3_additional_kwargs`` for encryption by the store. Never credentials:
    those come from the environment, and so does the endpoint of an S3 store (docs/storage.md)."""
    timeout: PositiveFloat = 60
    """Seconds one storage operation may take, retries included; of a large object, one part of it."""


class RunConfig(Section):
    """The process side of a run."""

    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Where models run."""
    ray_address: str | None = None
    """Ray cluster; default: $RAY_ADDRESS, else one is started that ends with this process."""
    start_timeout: PositiveFloat = 900
    """Seconds engines and ranks may take to start."""
    stage_timeout: PositiveFloat = 7200
    """Seconds one stage may take."""
    lease_seconds: PositiveFloat = 60
    """A run whose owner has not renewed its lease for so long may be taken over; its actors go away."""
    sample_rows: PositiveInt = 8
    """Sample answers in each iteration's table."""
    cpu_threads: PositiveInt | None = None
    """CPU threads of each engine and training rank. Default: of a rank, the cores shared by all; of an engine the same, less
    one for the process that feeds it."""
    trust_remote_code: bool = False
    """Let a model repository's own Python code run. Read it first."""
    secrets: dict[str, str] = Field(default_factory=dict)
    """Environment variable -> name of a Prefect block of type Secret, whose value every process of the run finds in it. For
    tokens and keys of storage, reward servers and trackers (docs/security.md); the value itself is never stored."""
    max_restarts: NonNegativeInt = 2
    """Times the workers of one stage are rebuilt before the run fails."""


class Config(Section):
    """A run."""

    actor: ActorConfig
    """The policy that is trained."""
    data: DataConfig
    """Where prompts come from."""
    critic: CriticConfig = CriticConfig()
    """The value network of PPO."""
    ref: RefConfig = RefConfig()
    """The frozen reference model."""
    ds: DeepSpeedConfig = DeepSpeedConfig()
    """How models are loaded and trained."""
    vllm: VllmConfig = VllmConfig()
    """The rollout engines."""
    rollout: RolloutConfig = RolloutConfig()
    """What is sampled."""
    reward: RewardConfig = RewardConfig()
    """How answers are scored."""
    algo: AlgoConfig = AlgoConfig()
    """The algorithm."""
    train: TrainConfig = TrainConfig()
    """How long and in what order."""
    agent: AgentConfig = AgentConfig()
    """Episodes of several turns."""
    eval: EvalConfig = EvalConfig()
    """Held-out prompts."""
    ckpt: CheckpointConfig = CheckpointConfig()
    """Snapshots."""
    replay: ReplayConfig = ReplayConfig()
    """Training on what another run sampled."""
    logger: LoggerConfig = LoggerConfig()
    """Where metrics go."""
    storage: StorageConfig = StorageConfig()
    """Where the run's log lies."""
    run: RunConfig = RunConfig()
    """The process side."""

    @model_validator(mode="after")
    def _check_rules(self) -> Config:
        rules.check(self)
        return self

    @property
    def samples_per_iteration(self) -> int:
        """Samples of a full iteration."""
        return self.rollout.batch_size * self.rollout.n_samples_per_prompt

    @property
    def samples_per_step(self) -> int:
        """Samples of a full optimizer step."""
        return self.train.batch_size or self.samples_per_iteration

    @property
    def scoring_token_budget(self) -> int | None:
        """Tokens of a micro-batch when log-probs and values are recomputed; None: it is cut by rows."""
        budget = self.train.token_budget
        return None if budget is None else self.rollout.max_tokens_per_gpu or budget

    @property
    def execution_mode(self) -> ExecutionMode:
        """Who plays the episodes: what is found first; more than one is refused."""
        return next(iter(modes_of(self)), "single_turn")

    @property
    def has_reward_source(self) -> bool:
        """True if something besides the agent scores answers."""
        reward = self.reward
        return bool(reward.functions or reward.remote_url) or reward.model_name_or_path is not None

    @property
    def loss_aggregation(self) -> str:
        """How token losses become one number."""
        if self.actor.loss_agg_mode is not None:
            return self.actor.loss_agg_mode
        if self.algo.advantage.estimator == "dr_grpo":
            return "constant_length"
        return "sample" if self.actor.policy_loss_type == "gspo" else "token"

    @property
    def max_model_len(self) -> int:
        """Context of the engines, tokens."""
        return self.vllm.max_model_len or self.data.max_len

    @property
    def needs_critic(self) -> bool:
        """True if a critic is trained."""
        enabled = self.critic.enable
        return self.algo.advantage.estimator == "gae" if enabled is None else enabled

    @property
    def generate_batch_size(self) -> int:
        """Prompts generated at a time."""
        return self.rollout.vllm_generate_batch_size or self.rollout.batch_size

    @property
    def fills_batches(self) -> bool:
        """True if a batch is filled in rounds: groups may be filtered, generated ahead, or generated in smaller lots."""
        return self.algo.dynamic_filtering_enable or self.generate_batch_size != self.rollout.batch_size

    @property
    def overlaps(self) -> bool:
        """True if iterations overlap. Those of a replay, which has no rollouts, never do."""
        return self.train.async_enable and not self.is_replay

    @property
    def rollout_lag(self) -> int:
        """Versions that the policy may be behind when a rollout starts: rollout k needs version k - this."""
        return self.train.async_queue_size if self.overlaps else 0

    @property
    def max_age(self) -> int | None:
        """Versions that a token may be behind the policy that trains on it; None: any.

        Where iterations overlap it is the lag of their rollouts; where they do not, only a group that was kept for a later
        batch is behind at all. The versions in a replay are its source's.
        """
        if self.is_replay:
            return None
        if self.overlaps:
            return self.rollout_lag
        return self.rollout.max_age if self.fills_batches else 0

    @property
    def pauses_requests(self) -> bool:
        """True if a weight sync meets requests in flight, which go on with the new weights."""
        return self.overlaps and self.train.partial_rollout_enable

    @property
    def carries_unfinished(self) -> bool:
        """True if an iteration closes when its batch is full, and what is unfinished goes on in the next."""
        return self.pauses_requests and self.fills_batches

    @property
    def corrects_mismatch(self) -> bool:
        """True if token losses are corrected for who spoke the tokens."""
        wanted = self.algo.advantage.is_correction_enable
        return self.rollout_lag > 0 if wanted is None else wanted

    @property
    def reuses_logprobs(self) -> bool:
        """True if the log-probs before the update are taken from its own forward pass, and no other pass is made for them.

        They are the same numbers where an iteration is one optimizer step: each row passes once, by the weights that are about
        to change. Not where the KL is a penalty on the reward: the advantages are made of it, before the update.
        """
        penalises_kl = self.needs_reference and not self.algo.kl.use_loss
        return self.samples_per_step == self.samples_per_iteration and self.train.max_epochs == 1 and not penalises_kl

    @property
    def is_replay(self) -> bool:
        """True if the run trains on what another one sampled."""
        return self.replay.source is not None

    @property
    def scores(self) -> bool:
        """True if answers are scored: a replay may take the rewards that they have."""
        return not self.is_replay or self.replay.rewards == "anew"

    @property
    def needs_reference(self) -> bool:
        """True if a reference model is made."""
        return self.algo.kl.init_coef > 0
