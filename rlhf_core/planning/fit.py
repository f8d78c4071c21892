"""Whether a run fits on its GPUs and nodes, and what to change where it does not.

::

    slots of the placement ─▶ kinds of GPU: who shares one ─▶ its phases: one works, the others rest ─▶ peak ≤ capacity?
                                                            no: ``remedies`` tries keys that would help

On one GPU the processes take turns: an engine generates, a model scores or learns, weights are sent. What the others hold
meanwhile depends on ``vllm.enable_sleep`` and ``ds.enable_sleep``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rlhf_core.config import Config
from rlhf_core.planning import memory
from rlhf_core.planning.memory import GIB, EngineNeed, Need, Part, Serving, Training

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlhf_core.config import Method, SupervisedConfig
    from rlhf_core.planning.memory import Device
    from rlhf_core.planning.shape import ModelShape

# Of a node, besides engines and ranks: the controller, rollout and scoring worker, Ray itself; and a reward process.
LIGHT_PROCESSES = 2.0 * GIB
REWARD_PROCESS = 0.1 * GIB
PAIR = 2  # rows of a preference


@dataclass(frozen=True, slots=True)
class Machines:
    """What a run is planned for."""

    nodes: int
    gpus: int  # of each node
    gpu_bytes: float  # of each GPU; 0 without any
    node_bytes: float | None  # of host memory of each node; None: not known, and not checked


@dataclass(frozen=True, slots=True)
class Place:
    """A kind of GPU (or a node, on CPU): what shares it, and what that takes."""

    name: str
    count: int  # of such GPUs or nodes
    roles: tuple[str, ...]
    phases: dict[str, float]  # what happens -> bytes in use then
    capacity: float | None

    @property
    def peak(self) -> float:
        """Bytes in the worst phase."""
        return max(self.phases.values())

    @property
    def fits(self) -> bool:
        """True also where nobody knows how much there is."""
        return self.capacity is None or self.peak <= self.capacity


@dataclass(frozen=True, slots=True)
class Footprint:
    """Everything that a run holds."""

    device: Device
    needs: dict[str, Need]  # by role; of an engine on GPU: of one of its GPUs
    counts: dict[str, int]  # processes by role
    places: tuple[Place, ...]
    engine: EngineNeed | None = None
    sequences: int = 0  # that the KV cache holds at full length, of an engine
    wanted_sequences: int = 0  # vllm.max_num_seqs
    problems: tuple[str, ...] = field(default=())  # what cannot be, apart from places that are too small

    @property
    def fits(self) -> bool:
        """True if every place is large enough, and nothing else is wrong."""
        return not self.problems and all(place.fits for place in self.places)


def footprint(
    config: Config | SupervisedConfig,
    shapes: Mapping[str, ModelShape],
    slots: Sequence[tuple[int, frozenset[str]]],
    device: Device,
    machines: Machines,
    method: Method = "sft",
) -> Footprint:
    """Of a run.

    Args:
        config: its configuration.
        shapes: of its models, by role: policy, reference, critic, reward.
        slots: of its placement: (GPUs, roles of the processes in it).
        device: what models run on.
        machines: that it is planned for.
        method: of a supervised run.
    """
    served = None
    if isinstance(config, Config):
        needs, served = _needs(config, shapes, device, machines)
    else:
        needs = {"model": _supervised_rank(config, shapes, device, method)}
    counts = Counter[str]()
    for _, roles in slots:
        counts.update(roles)
    if isinstance(config, Config) and "engine" in counts:
        counts["engine"] = config.vllm.num_engines
    places = _gpus(config, needs, slots, machines) if device == "gpu" else []
    places += _nodes(config, needs, counts, slots, device, machines)
    sequences = wanted = 0
    problems = []
    if served is not None and isinstance(config, Config) and counts["engine"]:
        sequences, wanted = served.kv_tokens // config.max_model_len, config.vllm.max_num_seqs
        if sequences < 1:
            problems.append(_no_cache(config, served, device))
    return Footprint(device, needs, dict(counts), tuple(places), served, sequences, wanted, tuple(problems))


def _needs(
    config: Config, shapes: Mapping[str, ModelShape], device: Device, machines: Machines
) -> tuple[dict[str, Need], EngineNeed]:
    ds, train = config.ds, config.train
    longest = config.data.max_len
    sleeps = ds.enable_sleep and train.colocate_all
    learned = _tokens(train.token_budget, ds.ranks_per_row, train.micro_batch_size * longest)
    scored = _tokens(config.scoring_token_budget, ds.ranks_per_row, config.rollout.micro_batch_size * longest)

    def how(ranks: int, tokens: int, section: str, trained: bool) -> Training:
        settings = config.critic if section == "critic" else config.actor
        return Training(
            ranks=ranks,
            zero_stage=ds.zero_stage,
            dtype=ds.param_dtype,
            tokens=max(tokens, longest),
            longest=longest,
            chunk=ds.logprob_chunk,
            checkpointing=trained and settings.gradient_checkpointing_enable,
            eager_attention=ds.attn_implementation == "eager",
            muon=settings.optim == "muon",
            adam_offload=ds.adam_offload,
            tensor_parallel=ds.tensor_parallel_size,
            sequence_parallel=ds.ranks_per_row,
            zpg=ds.zpg,
            lora_rank=ds.lora.rank if trained else 0,
            in_4bit=ds.load_in_4bit,
            moving_average=trained and section == "actor" and train.enable_ema,
            section=section,
        )

    needs = {
        "policy": memory.learning_rank(
            "policy", shapes["policy"], how(config.actor.world_size, learned, "actor", True), device, sleeps
        )
    }
    if "critic" in shapes:
        critic = how(config.critic.world_size, learned, "critic", True)
        needs["critic"] = memory.learning_rank("critic", shapes["critic"], critic, device, sleeps)
    if "reference" in shapes:
        ranks = config.ref.num_nodes * config.ref.num_gpus_per_node
        needs["reference"] = memory.scoring_rank(
            "reference", shapes["reference"], how(ranks, scored, "actor", False), device,
            offload=config.ref.offload, sleeps=sleeps,
        )  # fmt: skip
    if "reward" in shapes:
        rows = config.reward.model_micro_batch_size * (config.reward.model_max_len or longest)
        alone = replace(how(1, rows, "actor", False), tensor_parallel=1, sequence_parallel=1)
        needs["reward"] = memory.scoring_rank("reward", shapes["reward"], alone, device, sleeps=sleeps)
    vllm = config.vllm
    serving = Serving(
        dtype=ds.param_dtype if vllm.dtype == "auto" else vllm.dtype,
        tensor_parallel=vllm.tensor_parallel_size,
        max_num_seqs=vllm.max_num_seqs,
        max_len=config.max_model_len,
        utilization=vllm.gpu_memory_utilization,
        cpu_kv_gib=vllm.cpu_kv_cache_gib,
        enforce_eager=vllm.enforce_eager,
        sleep_level=vllm.sleep_level if vllm.enable_sleep else 0,
    )
    served = memory.engine(shapes["policy"], serving, device, machines.gpu_bytes)
    needs["engine"] = served.need
    return needs, served


def _supervised_rank(
    config: SupervisedConfig, shapes: Mapping[str, ModelShape], device: Device, method: Method
) -> Need:
    ds, train, longest = config.ds, config.train, config.data.max_len
    rows = 1 if method == "sft" else PAIR
    how = Training(
        ranks=config.model.world_size,
        zero_stage=ds.zero_stage,
        dtype=ds.param_dtype,
        tokens=max(
            _tokens(train.token_budget, ds.ranks_per_row, train.micro_batch_size * rows * longest), rows * longest
        ),
        longest=longest,
        chunk=ds.logprob_chunk,
        checkpointing=config.model.gradient_checkpointing_enable,
        eager_attention=ds.attn_implementation == "eager",
        muon=config.model.optim == "muon",
        adam_offload=ds.adam_offload,
        tensor_parallel=ds.tensor_parallel_size,
        sequence_parallel=ds.ranks_per_row,
        zpg=ds.zpg,
        lora_rank=ds.lora.rank,
        in_4bit=ds.load_in_4bit,
        moving_average=train.enable_ema,
        section="model",
    )
    need = memory.learning_rank("model", shapes["policy"], how, device)
    if method != "dpo":
        return need
    frozen = memory.BYTES[how.dtype] * shapes["reference"].parameters / (how.ranks if how.zero_stage == 3 else 1)
    reference = Part("reference", frozen, "ds.zero_stage")
    return Need("model", (*need.parts, reference), need.host, need.resting + frozen, need.resting_host)


def _gpus(
    config: Config | SupervisedConfig,
    needs: Mapping[str, Need],
    slots: Sequence[tuple[int, frozenset[str]]],
    machines: Machines,
) -> list[Place]:
    kinds = Counter[frozenset[str]]()
    for gpus, roles in slots:
        kinds[roles] += gpus
    return [
        Place("GPU", count, tuple(sorted(roles)), _phases(config, needs, roles), machines.gpu_bytes)
        for roles, count in kinds.items()
    ]


def _phases(config: Config | SupervisedConfig, needs: Mapping[str, Need], roles: frozenset[str]) -> dict[str, float]:
    """What is in use of one GPU while each of the processes that share it works."""
    resting = {role: needs[role].resting for role in roles}
    phases = {}
    for role in sorted(roles):
        word = {"engine": "generation", "policy": "update", "model": "training"}.get(role, role)
        phases[word] = needs[role].bytes + sum(bytes_ for other, bytes_ in resting.items() if other != role)
    if {"engine", "policy"} <= roles and isinstance(config, Config):
        weights = {role: _part(needs[role], name) for role, name in (("engine", "weights"), ("policy", "parameters"))}
        held = max(resting["engine"], weights["engine"] + memory.ENGINE_PROCESS["gpu"])
        sender = max(resting["policy"], weights["policy"] + memory.RANK_PROCESS["gpu"]) + _part(
            needs["policy"], "buffers"
        )
        others = sum(bytes_ for role, bytes_ in resting.items() if role not in weights)
        phases["weight sync"] = held + sender + others
    return phases


def _nodes(
    config: Config | SupervisedConfig,
    needs: Mapping[str, Need],
    counts: Mapping[str, int],
    slots: Sequence[tuple[int, frozenset[str]]],
    device: Device,
    machines: Machines,
) -> list[Place]:
    """Host memory of a node, of as many as the run needs."""
    if device == "cpu":
        held = sum(needs[role].bytes * count for role, count in counts.items())
        used = machines.nodes
    else:
        held = sum((needs[role].host_bytes + needs[role].resting_host) * count for role, count in counts.items())
        used = max(1, min(machines.nodes, -(-sum(gpus for gpus, _ in slots) // max(machines.gpus, 1))))
    light = LIGHT_PROCESSES
    if isinstance(config, Config):
        light += REWARD_PROCESS * config.reward.num_workers
    return [Place("node", used, tuple(sorted(counts)), {"host memory": held / used + light}, machines.node_bytes)]


def _no_cache(config: Config, served: EngineNeed, device: Device) -> str:
    one = served.kv_per_token * config.max_model_len
    key = "vllm.cpu_kv_cache_gib" if device == "cpu" else "vllm.gpu_memory_utilization, vllm.tensor_parallel_size"
    return (
        f"the KV cache of an engine holds {served.kv_bytes / GIB:.2f} GiB, one sequence of {config.max_model_len} tokens "
        f"needs {one / GIB:.2f} GiB: raise {key}, or lower data.max_len"
    )


def _tokens(budget: int | None, ranks_per_row: int, by_rows: int) -> int:
    """Of a micro-batch of all ranks that compute the same rows: a budget is each rank's own."""
    return by_rows if budget is None else budget * ranks_per_row


def _part(need: Need, name: str) -> float:
    return sum(part.bytes for part in need.parts if part.name == name)
