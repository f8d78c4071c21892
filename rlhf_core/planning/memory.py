"""Bytes of each kind of process, part by part.

::

    a rank that learns   parameters + gradients + optimizer + max(activations + logits, copy of the step) + buffers + process
    a rank that scores   parameters + activations of one layer + logits + process
    an engine            on GPU: vllm.gpu_memory_utilization of the device, of which weights, overhead, and the rest is KV cache
                         on CPU: weights + vllm.cpu_kv_cache_gib + process

Sources: model states by ZeRO stage, Rajbhandari et al. 2020 (arXiv:1910.02054, §3.1, figure 1); activations of a layer, after
Korthikanti et al. 2022 (arXiv:2205.05198, §4), counted anew for RMSNorm, a gated MLP and no dropout; KV cache, Kwon et al.
2023 (arXiv:2309.06180); what DeepSpeed 0.19 keeps besides, by measurement: ``tests/pipeline/test_plan_measured.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rlhf_core.planning.shape import ModelShape

GIB = 2**30
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
FP32 = 4

# A process before it holds a tensor of a model: measured on CPU (a rank 0.60 GiB, without Ray); on GPU assumed, for the CUDA
# context, cuBLAS' workspace and NCCL's buffers.
RANK_PROCESS = {"cpu": 0.75 * GIB, "gpu": 1.5 * GIB}
ENGINE_PROCESS = {"cpu": 1.6 * GIB, "gpu": 1.5 * GIB}  # on CPU of two processes: the actor, and vLLM's engine core
ENGINE_WORKER = 0.9 * GIB  # of each further worker of an engine on CPU
HOST_PROCESS = 1.5 * GIB  # of host memory, of any process on GPU
FRAGMENTATION = 0.05  # of what torch's allocator hands out, held and not used
BUCKET_ELEMENTS = 50_000_000  # of DeepSpeed's reductions: training.ds_config
LIVE_ELEMENTS = 1_000_000_000  # parameters that ZeRO-3 keeps gathered at most: DeepSpeed's stage3_max_live_parameters
LOGIT_TILE = {
    "cpu": 1 << 21,
    "gpu": 1 << 25,
}  # elements of a tile of logits, and the fewest columns: algorithms.logprobs
TILE_COLUMNS = 128
LOGIT_COPIES = 3  # logits, their exponentials and their gradient exist at once
NF4 = 0.5 + 4 / 64 / 4  # bytes of a parameter in 4 bits, with its scales (Dettmers et al. 2023, arXiv:2305.14314)
GRAPHS = 1.0 * GIB  # CUDA graphs of an engine, unless vllm.enforce_eager
BATCHED_TOKENS = 8192  # that vLLM computes in one step, by default, on large GPUs

Device = Literal["cpu", "gpu"]


@dataclass(frozen=True, slots=True)
class Part:
    """One summand."""

    name: str
    bytes: float
    key: str  # of the configuration that it depends on most


@dataclass(frozen=True, slots=True)
class Training:
    """How a model is trained: what its memory depends on."""

    ranks: int
    zero_stage: int
    dtype: str  # of the parameters: bf16, fp16, fp32
    tokens: int  # of a micro-batch, padding counted
    longest: int  # tokens of a row
    chunk: int  # ds.logprob_chunk
    checkpointing: bool = False  # activations are computed again in the backward pass
    eager_attention: bool = False
    muon: bool = False
    adam_offload: bool = False
    tensor_parallel: int = 1
    sequence_parallel: int = 1
    zpg: int = 1  # ranks over which ZeRO 3 keeps a second copy of the parameters (ds.zpg)
    lora_rank: int = 0
    in_4bit: bool = False
    moving_average: bool = False
    section: str = "actor"  # of the configuration

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO divides the states of a model part."""
        return max(1, self.ranks // self.tensor_parallel)


@dataclass(frozen=True, slots=True)
class Need:
    """Of a process: what it holds on its device and in host memory, and what of it goes away while others take their turn."""

    role: str
    parts: tuple[Part, ...]  # on the device while it works
    host: tuple[Part, ...] = ()  # in host memory while it works
    resting: float = 0.0  # bytes on the device while others work
    resting_host: float = 0.0  # bytes in host memory meanwhile, on top

    @property
    def bytes(self) -> float:
        """On the device while it works."""
        return sum(part.bytes for part in self.parts)

    @property
    def host_bytes(self) -> float:
        """In host memory while it works."""
        return sum(part.bytes for part in self.host)


def optimizer_bytes(shape: ModelShape, how: Training) -> float:
    """Of all ranks together: fp32 master weights, and AdamW's two moments or Muon's one.

    12 bytes a trained parameter (Rajbhandari et al.: K = 12); 8 without master weights, which ZeRO 0 in fp32 does not have.
    """
    trained = trained_parameters(shape, how)
    master = 0 if how.zero_stage == 0 and how.dtype == "fp32" else FP32
    moments = 2 * FP32 * trained
    if how.muon and not how.lora_rank:
        moments -= FP32 * shape.matrices
    return master * trained + moments


def trained_parameters(shape: ModelShape, how: Training) -> int:
    """That have gradients."""
    return shape.lora_parameters(how.lora_rank) if how.lora_rank else shape.parameters


def part_of_rank(shape: ModelShape, how: Training) -> float:
    """Share of the model's parameters that a rank of a tensor parallel group has: of the matrices inside the layers its part,
    embeddings, output layer and norms whole (Shoeybi et al. 2019, arXiv:1909.08053; here without their division of embeddings).
    """
    return 1 - shape.matrices / shape.parameters * (1 - 1 / how.tensor_parallel)


def learning_rank(role: str, shape: ModelShape, how: Training, device: Device, sleeps: bool = False) -> Need:
    """One rank of a model that learns.

    Args:
        role: of the model.
        shape: of the model.
        how: it is trained.
        device: it works on.
        sleeps: everything goes to host memory while others work (``ds.enable_sleep``).
    """
    trained = trained_parameters(shape, how)
    share, mine = how.shards, part_of_rank(shape, how)
    parameters = _parameter_bytes(shape, how) * mine + (BYTES[how.dtype] * trained if how.lora_rank else 0)
    of_zero3 = how.zero_stage == 3
    states = optimizer_bytes(shape, how) * mine / (share if how.zero_stage else 1)
    gradients = FP32 * trained * mine / (share if how.zero_stage >= 2 else 1)
    step_copy = FP32 * trained * mine / share if how.zero_stage in (1, 2) else 0.0
    working = activation_bytes(shape, how) + logit_bytes(shape, how, device)
    buffers = 0.0
    if how.zero_stage:
        buffers += FP32 * BUCKET_ELEMENTS
    if of_zero3:
        buffers += BYTES[how.dtype] * min(shape.parameters, LIVE_ELEMENTS)
        buffers += BYTES[how.dtype] * shape.parameters / how.zpg if how.zpg > 1 else 0.0
    parts = [
        Part("parameters", parameters / (share if of_zero3 else 1), "ds.zero_stage"),
        Part("gradients", gradients, "ds.zero_stage"),
        *([] if how.adam_offload else [Part("optimizer", states, "ds.zero_stage")]),
        Part(
            "activations and logits" if working >= step_copy else "copy of the step",
            max(working, step_copy),
            _rows_key(how),
        ),
        Part("buffers", buffers, "ds.zero_stage"),
    ]
    loose = sum(part.bytes for part in parts)
    parts.append(Part("fragmentation", FRAGMENTATION * loose if device == "gpu" else 0.0, ""))
    parts.append(Part("process", RANK_PROCESS[device], ""))
    host = []
    if how.adam_offload:
        # Gradients are copied there for the step; DeepSpeed pins both.
        host.append(
            Part(
                "optimizer and gradients",
                states + FP32 * trained * mine / (share if how.zero_stage else 1),
                "ds.adam_offload",
            )
        )
    if how.moving_average:
        host.append(Part("moving average", FP32 * shape.parameters / how.ranks, "train.enable_ema"))
    if device == "gpu":
        host.append(Part("process", HOST_PROCESS, ""))
    held = sum(part.bytes for part in parts[:2]) + (0 if how.adam_offload else states) + buffers
    rests, waits = (RANK_PROCESS[device], held) if sleeps and device == "gpu" else (held + RANK_PROCESS[device], 0.0)
    return Need(role, tuple(parts), tuple(host), rests, waits)


def scoring_rank(
    role: str, shape: ModelShape, how: Training, device: Device, *, offload: bool = False, sleeps: bool = False
) -> Need:
    """One rank of a model that is only asked: its parameters are sharded by ZeRO 3 alone.

    Args:
        role: of the model.
        shape: of the model.
        how: ranks, rows and types, as of a model that learns.
        device: it works on.
        offload: its weights wait in host memory between passes (``ref.offload``).
        sleeps: as of ``learning_rank``.
    """
    sharded = how.zero_stage == 3
    parameters = _parameter_bytes(shape, how) * part_of_rank(shape, how) / (how.ranks if sharded else 1)
    gathered = BYTES[how.dtype] * min(shape.parameters, LIVE_ELEMENTS) if sharded else 0.0
    one_layer = _layer_bytes(shape, how)
    parts = [
        Part("parameters", parameters, "ds.zero_stage"),
        Part("activations and logits", one_layer + logit_bytes(shape, how, device), "rollout.micro_batch_size"),
        Part("buffers", gathered, "ds.zero_stage"),
    ]
    parts.append(Part("fragmentation", FRAGMENTATION * sum(p.bytes for p in parts) if device == "gpu" else 0.0, ""))
    parts.append(Part("process", RANK_PROCESS[device], ""))
    away = (offload or sleeps) and device == "gpu"
    host = (Part("process", HOST_PROCESS, ""),) if device == "gpu" else ()
    rests = RANK_PROCESS[device] + (0.0 if away else parameters)
    return Need(role, tuple(parts), host, rests, parameters if away else 0.0)


@dataclass(frozen=True, slots=True)
class Serving:
    """How an engine serves a model."""

    dtype: str
    tensor_parallel: int
    max_num_seqs: int
    max_len: int  # tokens of a sequence, prompt and answer
    utilization: float  # of a GPU's memory
    cpu_kv_gib: float
    enforce_eager: bool = False
    sleep_level: int = 0  # 0: it never sleeps


@dataclass(frozen=True, slots=True)
class EngineNeed:
    """Of one GPU of an engine (on CPU: of the engine), and what its KV cache holds."""

    need: Need
    kv_bytes: float  # of the whole engine
    kv_per_token: float  # of the whole engine

    @property
    def kv_tokens(self) -> int:
        """That the cache holds."""
        return max(0, int(self.kv_bytes / self.kv_per_token))


def engine(shape: ModelShape, how: Serving, device: Device, gpu_bytes: float) -> EngineNeed:
    """One engine. On GPU vLLM takes its share of the device whatever the model: the KV cache gets what is left of it."""
    cut = how.tensor_parallel
    weights = BYTES[how.dtype] * shape.parameters / cut
    per_token = float(BYTES[how.dtype] * shape.kv_elements)
    if device == "cpu":
        kv = how.cpu_kv_gib * GIB
        parts = (
            Part("weights", weights * cut, "vllm.dtype"),
            Part("KV cache", kv * cut, "vllm.cpu_kv_cache_gib"),
            Part("process", ENGINE_PROCESS["cpu"] + ENGINE_WORKER * (0 if cut == 1 else cut), ""),
        )
        need = Need("engine", parts, (), sum(part.bytes for part in parts))
        return EngineNeed(need, kv * cut, per_token)
    taken = how.utilization * gpu_bytes
    # Logits of every sequence in fp32, and the widest activations of a step: what vLLM's profiling run finds.
    step = 2 * FP32 * how.max_num_seqs * shape.vocabulary / cut + 2 * BATCHED_TOKENS * (
        2 * shape.hidden + 2 * shape.intermediate / cut
    )
    overhead = ENGINE_PROCESS["gpu"] + step + (0 if how.enforce_eager else GRAPHS)
    kv = taken - weights - overhead
    parts = (
        Part("weights", weights, "vllm.tensor_parallel_size"),
        Part("overhead", overhead, "vllm.max_num_seqs"),
        Part("KV cache", max(kv, 0.0), "vllm.gpu_memory_utilization"),
    )
    host = (Part("process", HOST_PROCESS, ""),)
    rests = ENGINE_PROCESS["gpu"] if how.sleep_level else max(taken, weights + overhead)
    need = Need("engine", parts, host, rests, weights if how.sleep_level == 1 else 0.0)
    return EngineNeed(need, kv * cut, per_token)


def activation_bytes(shape: ModelShape, how: Training) -> float:
    """Kept from the forward to the backward pass of a micro-batch.

    With gradient checkpointing: the input of every layer, and all of one (Chen et al. 2016, arXiv:1604.06174).
    """
    tokens = how.tokens / how.sequence_parallel
    hidden = BYTES[how.dtype] * tokens * shape.hidden
    whole = _layer_bytes(shape, how)
    ends = 2 * FP32 * tokens * shape.hidden  # the last hidden states, and their gradient in fp32
    if how.checkpointing:
        return shape.layers * hidden + whole + ends
    return shape.layers * whole + ends


def logit_bytes(shape: ModelShape, how: Training, device: Device) -> float:
    """Of the tiles of logits that exist at a time; the full logits never do."""
    tile = min(max(LOGIT_TILE[device], TILE_COLUMNS * how.tokens), min(how.chunk, how.tokens) * shape.vocabulary)
    return float(LOGIT_COPIES * FP32 * tile)


def _layer_bytes(shape: ModelShape, how: Training) -> float:
    """Of one layer, for the backward pass. By token, in elements of the parameters' type, but for the norms' fp32::

    2 norms       in, out: 2 h, and h in fp32
    attention     q, k, v before and after the rotary embedding, and its output: 2 (a + 2 k) d + a d
    gated MLP     gate, up, act(gate), their product: 4 f
    eager only    the scores before and after softmax, which is in fp32 there: a T each
    """
    tokens, cut = how.tokens / how.sequence_parallel, how.tensor_parallel
    attention = 2 * (shape.heads + 2 * shape.kv_heads) * shape.head_dim + shape.heads * shape.head_dim
    elements = 4 * shape.hidden + (attention + 4 * shape.intermediate) / cut
    of_token = BYTES[how.dtype] * elements + 2 * FP32 * shape.hidden
    if how.eager_attention:
        of_token += (BYTES[how.dtype] + FP32) * shape.heads / cut * how.longest
    return tokens * of_token


def _parameter_bytes(shape: ModelShape, how: Training) -> float:
    return (NF4 if how.in_4bit else BYTES[how.dtype]) * shape.parameters


def _rows_key(how: Training) -> str:
    return "train.micro_batch_size" if how.checkpointing else f"{how.section}.gradient_checkpointing_enable"
