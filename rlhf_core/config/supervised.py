"""Every key of a run that trains on given answers: SFT, reward models, DPO.

The sections that a run by rewards has too (``ds``, ``ckpt``, ``logger``, ``storage``, ``run``) are the same ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rlhf_core.config import supervised_rules
from rlhf_core.config.base import FloatList, NonNegativeFloat, NonNegativeInt, Section, StringList
from rlhf_core.config.model import CheckpointConfig, LoggerConfig, RunConfig, StorageConfig
from rlhf_core.config.trained import BatchedTrainConfig, DeepSpeedConfig, HeldOutConfig, TrainedModelConfig

if TYPE_CHECKING:
    from typing import TypeAlias

Method: TypeAlias = Literal["sft", "reward_model", "dpo"]


class ModelConfig(TrainedModelConfig):
    """The model that is trained."""

    model_name_or_path: str = Field(min_length=1)
    """A Hugging Face id, a folder, ``builtin:tiny``, or ``run:ID``, ``run:ID@best``, ``run:ID@12``: the newest, best or named
    checkpoint of a run below ``storage.root``."""


class SupervisedDataConfig(Section):
    """Where the examples come from and how they become tokens."""

    dataset: StringList = Field(min_length=1)
    """As ``data.prompt_dataset`` of a run by rewards: files, folders, hub ids, ``path.py:function``."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    probs: FloatList | None = None
    """Mixing weights of the datasets; default: all rows of all."""
    max_samples: PositiveInt | None = None
    """Use only the first rows of each dataset."""
    input_key: str = "input"
    """SFT: column of the prompt (text or chat messages); or of the whole conversation, where there is no ``output_key``."""
    output_key: str | None = "output"
    """SFT: column of the answer; null: ``input_key`` holds a whole conversation, every assistant turn of which is trained."""
    prompt_key: str | None = "prompt"
    """Preferences: column of the prompt; null: chosen and rejected hold whole conversations."""
    chosen_key: str = "chosen"
    """Preferences: column of the better answer (text, or chat messages)."""
    rejected_key: str = "rejected"
    """Preferences: column of the worse answer."""
    margin_key: str | None = None
    """Reward models: column of the margin by which chosen is better."""
    id_key: str | None = None
    """Column of the row id; default: the datasource and the row number."""
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
    overlong: Literal["drop", "error"] = "drop"
    """A row longer than ``max_len`` is dropped and counted, or refused; it is never cut."""
    disable_fast_tokenizer: bool = False
    """Use the slow tokenizer."""


class SftConfig(Section):
    """Supervised fine-tuning."""

    train_on_prompt: bool = False
    """Train on every token, as in pre-training, instead of the answers alone."""


class RewardModelConfig(Section):
    """A reward model from preferences: the log-likelihood of the better answer under Bradley and Terry's model."""

    center_coef: NonNegativeFloat = 0.0
    """Weight of the squared sum of both scores, which keeps them around 0."""


class DpoConfig(Section):
    """Direct preference optimisation."""

    loss: Literal["dpo", "ipo"] = "dpo"
    """dpo: logistic loss; ipo: squared distance of the log-ratio margin from ``1 / (2 beta)``."""
    beta: PositiveFloat = 0.1
    """Strength of the pull towards the reference."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """cDPO: the share of preferences assumed to be the wrong way round."""
    nll_coef: NonNegativeFloat = 0.0
    """Weight of the chosen answer's mean negative log-likelihood."""
    ref_model_name_or_path: str | None = None
    """The frozen reference; default: ``model.model_name_or_path``."""


class SupervisedTrainConfig(BatchedTrainConfig):
    """How long and in what order."""

    max_epochs: PositiveInt = 1
    """Passes through the examples."""
    max_steps: PositiveInt | None = None
    """Stop after this many optimizer steps."""
    batch_size: PositiveInt = 128
    """Examples (preference pairs) per optimizer step, over all ranks. The last step of an epoch may be short."""
    steps_per_iteration: PositiveInt = 10
    """Optimizer steps that are recorded together, as one iteration of the log: a resumed run repeats at most as many."""
    loss_agg_mode: Literal["token", "sample"] = "token"
    """SFT: a mean over all trained tokens of the step, or over the means of its rows."""
    aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of a mixture-of-experts model's balancing loss."""
    seed: NonNegativeInt = 42
    """Of the order of examples, and of new heads."""


class SupervisedConfig(Section):
    """A run of SFT, reward-model training or DPO."""

    model: ModelConfig
    """The model that is trained."""
    data: SupervisedDataConfig
    """Where the examples come from."""
    sft: SftConfig = SftConfig()
    """Supervised fine-tuning."""
    reward_model: RewardModelConfig = RewardModelConfig()
    """Reward models."""
    dpo: DpoConfig = DpoConfig()
    """Direct preference optimisation."""
    ds: DeepSpeedConfig = DeepSpeedConfig()
    """How the model is loaded and trained."""
    train: SupervisedTrainConfig = SupervisedTrainConfig()
    """How long and in what order."""
    eval: HeldOutConfig = HeldOutConfig()
    """Held-out examples."""
    ckpt: CheckpointConfig = CheckpointConfig()
    """Snapshots, every so many iterations."""
    logger: LoggerConfig = LoggerConfig()
    """Where metrics go."""
    storage: StorageConfig = StorageConfig()
    """Where the run's log lies."""
    run: RunConfig = RunConfig()
    """The process side."""

    @model_validator(mode="after")
    def _check_rules(self) -> SupervisedConfig:
        supervised_rules.check(self)
        return self
