"""Sections that every kind of training shares: the optimizer of one model, and DeepSpeed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from rlhf_core.config.base import Fraction, NonNegativeFloat, NonNegativeInt, Section, StringList


class AdamConfig(Section):
    """AdamW."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay rates of the moments."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; biases and norms are exempt."""


class MuonConfig(Section):
    """Muon, for the matrices inside the layers. Embeddings, output layer, biases and norms are trained by AdamW."""

    lr: PositiveFloat = 0.02
    """Peak learning rate of the matrices."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Momentum of the orthogonalised gradient."""


class TrainedModelConfig(Section):
    """How one model is trained: its ranks, its optimizer, its learning rate."""

    num_nodes: PositiveInt = 1
    """Nodes its ranks are spread over."""
    num_gpus_per_node: PositiveInt = 1
    """Training ranks per node: one GPU each, or one process each on CPU."""
    gradient_checkpointing_enable: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    optim: Literal["adam", "muon"] = "adam"
    """The optimizer."""
    adam: AdamConfig = AdamConfig()
    """Settings of AdamW."""
    muon: MuonConfig = MuonConfig()
    """Settings of Muon, with ``optim=muon``."""
    lr_scheduler: Literal["constant", "linear", "cosine", "cosine_with_min_lr"] = "cosine_with_min_lr"
    """The shape of the learning rate over the optimizer steps of the run."""
    lr_warmup_ratio: Fraction = 0.03
    """Share of the optimizer steps in which the learning rate rises from 0 to its peak."""
    min_lr_ratio: Fraction = 0.1
    """Floor of ``cosine_with_min_lr`` as a share of the peak."""
    max_norm: PositiveFloat = 1.0
    """Gradients are clipped to this global norm; not with ``optim=muon``, whose updates have a size of their own."""

    @property
    def world_size(self) -> int:
        """Its training ranks."""
        return self.num_nodes * self.num_gpus_per_node


class BatchedTrainConfig(Section):
    """How any kind of training cuts its batches, and what it keeps besides the weights."""

    micro_batch_size: PositiveInt = 8
    """Rows (of DPO and reward models: pairs) per forward and backward pass of a rank. Never changes the gradient."""
    dynamic_batch_enable: bool = False
    """Fill micro-batches by tokens instead of rows."""
    max_tokens_per_gpu: PositiveInt = 16384
    """Token budget of a micro-batch, padding counted, with ``dynamic_batch_enable``."""
    full_determinism_enable: bool = False
    """Bit-reproducible kernels on GPU (CPU runs always are)."""
    enable_ema: bool = False
    """Keep an exponential moving average of the weights."""
    ema_beta: Fraction = 0.992
    """Its decay."""

    @property
    def token_budget(self) -> int | None:
        """Tokens of a micro-batch, padding counted; None: it is cut by rows."""
        return self.max_tokens_per_gpu if self.dynamic_batch_enable else None

    @property
    def decay_of_average(self) -> float | None:
        """Of the moving average; None: none is kept."""
        return self.ema_beta if self.enable_ema else None


class HeldOutConfig(Section):
    """What is evaluated, and when."""

    dataset: StringList = ()
    """As the training data; empty: no evaluation."""
    split: str = "test"
    """Split of a Hugging Face dataset."""
    steps: int = Field(default=-1, ge=-1)
    """Evaluate every so many iterations, besides the start and the end; -1: only there."""
    max_samples: PositiveInt | None = None
    """Use only the first rows of each dataset."""


class LoraConfig(Section):
    """Low-rank adapters."""

    rank: NonNegativeInt = 0
    """Rank of the adapters; 0: off. With adapters nothing else is trained, but for the new head of a critic or reward model."""
    alpha: PositiveFloat = 16
    """Scale of the adapters: what they say counts ``alpha / rank`` times."""
    dropout: Fraction = 0.0
    """Dropout before the adapters; of supervised training only."""
    target_modules: StringList = ("all-linear",)
    """Linear layers of the language model that get adapters, by the ends of their names (``q_proj``, ``mlp.up_proj``), or
    ``all-linear``. The output layer and a vision tower get none."""


class DeepSpeedConfig(Section):
    """How every model is loaded and trained."""

    zero_stage: Literal[0, 1, 2, 3] = 2
    """0: replicated; 1: optimizer states, 2: and gradients, 3: and parameters are sharded over the ranks."""
    param_dtype: Literal["bf16", "fp32", "fp16"] = "bf16"
    """Type of the parameters in the forward pass; master weights are fp32 in any case."""
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """Attention of the training side."""
    zpg: PositiveInt = 1
    """ZeRO++'s secondary shards (hpZ), with ``zero_stage=3``: so many ranks, those of a node, hold a copy of the parameters
    between forward and backward pass, so that the backward pass gathers within the node. 1: off."""
    adam_offload: bool = False
    """Keep master weights and optimizer states in host memory, and take the optimizer's steps there. Not with ``zero_stage=0``
    or ``optim=muon``."""
    tensor_parallel_size: PositiveInt = 1
    """Ranks that compute the same rows, each with its part of every layer (DeepSpeed's AutoTP): some of the heads, and some of
    the MLP's columns. For layers that are too large for one GPU, or too slow on it. Divides the ranks of every trained model,
    its heads, key-value heads and the width of its MLP. For dense text models, with ``zero_stage`` 1 or 2 (in fp32 also 0)."""
    sequence_parallel_size: PositiveInt = 1
    """Ranks that compute the same rows, each a part of their tokens (DeepSpeed-Ulysses): for rows whose activations one GPU
    does not hold. Divides the ranks of every trained model, and its attention heads. Needs ``packing_samples``; a micro-batch
    has the rows, or ``max_tokens_per_gpu`` times the ranks tokens, of the group."""
    ring_attn_size: PositiveInt = 1
    """OpenRLHF's name for ``sequence_parallel_size``."""
    packing_samples: bool = False
    """Models get the samples of a micro-batch as one row without padding, each with attention and positions of its own: less
    work where lengths differ, the same gradient. ``micro_batch_size`` samples, or as many as ``max_tokens_per_gpu`` holds with
    ``dynamic_batch_enable``. On GPU use ``attn_implementation=flash_attention_2``: ``sdpa`` takes one sample after the other.
    Text only; a model that carries a state from token to token, such as Qwen3-Next, is refused when it is loaded."""
    use_liger_kernel: bool = False
    """Liger's fused kernels for norms, rotary embeddings and gated layers, on GPU (``pip install 'rlhf-flow[liger]'``). A model
    that Liger has none for is refused when it is loaded."""
    load_in_4bit: bool = False
    """QLoRA: hold the frozen weights below adapters in 4 bits (NF4), of the policy, the critic and the reference. Needs
    ``ds.lora.rank``, bf16, ``zero_stage`` 0 to 2, a CUDA GPU and bitsandbytes."""
    enable_sleep: bool = False
    """Move every model but the engines to host memory while it is not needed, with ``train.colocate_all``."""
    use_universal_ckpt: bool = False
    """Checkpoints by parameter: a run can be resumed with other numbers of ranks and another ``zero_stage``. Not with fp16."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters."""
    logprob_chunk: PositiveInt = 1024
    """Logits that exist at a time, in tokens (times the vocabulary), at most. Fewer do where the device gains nothing from
    more: 8 MiB on CPU, 128 MiB on a GPU. The full logits never exist."""

    @property
    def ranks_per_row(self) -> int:
        """Ranks that divide the tokens of the same rows, under whichever of its names it was set."""
        return max(self.sequence_parallel_size, self.ring_attn_size)

    @property
    def ranks_together(self) -> int:
        """Ranks that compute the same rows, whatever they divide."""
        return self.ranks_per_row * self.tensor_parallel_size
