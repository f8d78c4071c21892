"""``rlhf plan -c FILE``: what a run will need, and whether the machines have it, before it is queued."""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlhf_cli.amounts import count, size
from rlhf_cli.arguments import AsJson, ConfigFile, Overrides, out
from rlhf_core.config import Config, SupervisedConfig
from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rlhf_core.cluster.placement import Node
    from rlhf_core.planning.disk import Disk
    from rlhf_core.planning.fit import Footprint, Machines, Place
    from rlhf_core.planning.remedies import Remedy
    from rlhf_core.planning.shape import ModelShape
    from rlhf_core.planning.speed import IterationTime, Speed

UNITS = {
    "": 2**30,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
CHAIN = "CHAIN"  # as configurations.loaded names it
MFU = 0.35  # share of the peak that training of dense models reaches on one node
CPU_MFU = 0.4


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes; default: the Ray cluster's, else this machine.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs of each node.")] = None,
    gpu_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Of each GPU, such as 80GiB.")] = None,
    node_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Host memory of each node, such as 512GiB.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Kind of GPU, such as H100: its speed, and its memory if not given.")
    ] = None,
    mfu: Annotated[
        float | None, typer.Option(min=0.01, max=1, help="Share of the peak operations that training reaches.")
    ] = None,
    flow: Annotated[
        Literal["train", "sft", "reward-model", "dpo"] | None,
        typer.Option("--flow", help="Of a supervised file; default: sft."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Memory of each GPU and node, storage and time of an iteration; exit code 1 if it does not fit, with keys to change."""
    wished = Wished(
        nodes, gpus, _bytes("--gpu-memory", gpu_memory), _bytes("--node-memory", node_memory), gpu, mfu, flow
    )
    with redirect_stdout(sys.stderr):  # DeepSpeed, which Transformers imports, logs to it: a warning is no JSON
        plans = [
            plan_one(run.name, run.config, replace(wished, flow=run.flow), run.made)
            for run in runs_of(config, overrides or [], flow)
        ]
    if as_json:
        out.print_json(
            json.dumps({"fits": all(each.fits for each in plans), "runs": [each.to_json() for each in plans]})
        )
    else:
        for each in plans:
            for line in each.lines():
                out.print(line, markup=False, soft_wrap=True)
    if not all(each.fits for each in plans):
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class Wished:
    """The machines of the command line; None: those that there are."""

    nodes: int | None
    gpus: int | None
    gpu_bytes: float | None
    node_bytes: float | None
    gpu: str | None
    mfu: float | None
    flow: str | None


@dataclass(frozen=True, slots=True)
class RunOfFile:
    """One of the runs that a file configures."""

    name: str  # of the stage of a chain; else ""
    config: Config | SupervisedConfig
    flow: str | None  # None: by the kind of its configuration
    made: dict[str, str]  # runs that earlier stages will have made -> the model that each starts from


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of one run."""

    name: str  # of the stage of a chain
    cluster: str
    shapes: dict[str, ModelShape]
    footprint: Footprint
    remedies: list[Remedy]
    disk: Disk | None
    time: IterationTime | None

    @property
    def fits(self) -> bool:
        """On these machines."""
        return self.footprint.fits

    def to_json(self) -> dict[str, Any]:
        """Bytes and seconds."""
        found = self.footprint
        return {
            "name": self.name,
            "cluster": self.cluster,
            "fits": self.fits,
            "device": found.device,
            "problems": list(found.problems),
            "models": {
                role: {"name": shape.name, "parameters": shape.parameters, "active_parameters": shape.active}
                for role, shape in self.shapes.items()
            },
            "processes": {
                role: {
                    "count": found.counts[role],
                    "bytes": round(need.bytes),
                    "parts": {part.name: round(part.bytes) for part in need.parts},
                    "host_bytes": round(need.host_bytes),
                    "resting_bytes": round(need.resting),
                    "resting_host_bytes": round(need.resting_host),
                }
                for role, need in found.needs.items()
                if found.counts.get(role)
            },
            "places": [{**asdict(place), "peak": place.peak, "fits": place.fits} for place in found.places],
            "kv_cache": None
            if found.engine is None or not found.counts.get("engine")
            else {
                "bytes": round(found.engine.kv_bytes),
                "bytes_per_token": found.engine.kv_per_token,
                "tokens": found.engine.kv_tokens,
                "sequences_at_full_length": found.sequences,
                "max_num_seqs": found.wanted_sequences,
            },
            "remedies": [asdict(remedy) for remedy in self.remedies],
            "disk": None if self.disk is None else asdict(self.disk),
            "time": None
            if self.time is None
            else {**asdict(self.time), "seconds": self.time.seconds, "tokens_per_second": self.time.tokens_per_second},
        }

    def lines(self) -> Iterator[str]:
        """For people."""
        from rlhf_core.planning.memory import FRAGMENTATION

        yield f"{f'stage {self.name}: ' if self.name else ''}{'fits' if self.fits else 'DOES NOT FIT'} on {self.cluster}"
        for role, shape in self.shapes.items():
            active = f", {_short(shape.active)} active" if shape.active != shape.parameters else ""
            yield f"  {role:<10} {shape.name}: {_short(shape.parameters)} parameters{active}"
        yield ""
        yield from self._processes()
        yield ""
        yield from (line for place in self.footprint.places for line in _place_lines(place))
        yield from self._cache()
        yield from (f"  PROBLEM    {problem}" for problem in self.footprint.problems)
        yield from self._remedies()
        if self.disk is not None:
            yield ""
            yield from _disk_lines(self.disk)
        if self.time is not None:
            yield ""
            yield from _time_lines(self.time)
        held = f", {FRAGMENTATION:.0%} of fragmentation" if self.footprint.device == "gpu" else ""
        yield f"  estimates, for rows as long as the configuration allows{held}; docs/planning.md says what they are made of"

    def _processes(self) -> Iterator[str]:
        for role, need in self.footprint.needs.items():
            if number := self.footprint.counts.get(role):
                parts = " + ".join(f"{part.name} {size(part.bytes)}" for part in need.parts if part.bytes)
                each = " a GPU" if role == "engine" and self.footprint.device == "gpu" else " each"
                yield f"  {f'{number} × {role}':<14} {size(need.bytes):>10}{each}: {parts}"
                if need.host_bytes and any(part.name != "process" for part in need.host):
                    held = " + ".join(f"{part.name} {size(part.bytes)}" for part in need.host)
                    yield f"  {'':<14} {size(need.host_bytes):>10} of host memory: {held}"

    def _cache(self) -> Iterator[str]:
        found = self.footprint
        if found.engine is None or not found.counts.get("engine"):
            return
        enough = "" if found.sequences >= found.wanted_sequences else ": more of them wait, or are computed again"
        yield (
            f"  {'KV cache':<10} {size(found.engine.kv_bytes)} an engine, {size(found.engine.kv_per_token)} a token: "
            f"{count(found.sequences, 'sequence')} at full length at once, vllm.max_num_seqs={found.wanted_sequences}{enough}"
        )

    def _remedies(self) -> Iterator[str]:
        if self.fits:
            return
        yield ""
        if not self.remedies:
            yield "  no single change of ours helps: use larger GPUs or more nodes, a smaller model, or a shorter data.max_len"
        for remedy in self.remedies[:8]:
            saved = f"saves {size(remedy.saved)}" if remedy.saved > 0 else "helps"
            yield f"  {'then it fits' if remedy.fits else saved:<14} {' '.join(remedy.overrides)}"
        if self.remedies and (last := self.remedies[-1]).fits and last not in self.remedies[:8]:
            yield f"  {'then it fits':<14} {' '.join(last.overrides)}"


def runs_of(config: str, overrides: Sequence[str], flow: str | None = None) -> Iterator[RunOfFile]:
    """What a file configures, each with its flow and with what the stages before it make.

    Args:
        config: the file.
        overrides: on top of it.
        flow: of a supervised file; None: sft.

    Raises:
        ConfigError: of the file; or ``flow`` is none that it can have.
    """
    from rlhf_cli.configurations import loaded

    flows = flows_of(config, overrides)
    made: dict[str, str] = {}
    for name, checked in loaded(config, overrides):
        if flow is not None and (flows or (flow == "train") != isinstance(checked, Config)):
            kind = (
                "is a chain, whose stages name their flows: remove --flow"
                if flows
                else "trains by rewards, in one way: remove --flow"
                if isinstance(checked, Config)
                else "is supervised: use sft, reward-model or dpo"
            )
            raise ConfigError(f"--flow {flow}: {config} {kind}")
        yield RunOfFile(name, checked, flows.get(name, flow), dict(made))
        made[f"{CHAIN}-{name}"] = _policy_of(checked)


def flows_of(config: str, overrides: Sequence[str]) -> dict[str, str]:
    """Of the stages of a chain, by name; {} of any other file."""
    from rlhf_core.config import kind_of, load_chain_config, plan_chain, read_yaml

    if kind_of(read_yaml(config)) != "chain":
        return {}
    return {run.name: run.flow for run in plan_chain(load_chain_config(config, overrides), CHAIN)}


def plan_one(name: str, config: Config | SupervisedConfig, wished: Wished, made: Mapping[str, str]) -> Planned:
    """The plan of one run; errors as ``rlhf config check``.

    Args:
        name: of the stage of a chain.
        config: of the run.
        wished: machines.
        made: as of ``shapes_of``.
    """
    from rlhf_core.planning.fit import footprint
    from rlhf_core.planning.remedies import remedies

    shapes = shapes_of(config, wished.flow, made)
    cluster, nodes, machines = machines_of(config, wished)
    method = {"dpo": "dpo", "reward-model": "reward_model"}.get(wished.flow or "sft", "sft")

    def of(changed: Config | SupervisedConfig) -> Footprint:
        device, slots = slots_of(changed, nodes)
        return footprint(changed, shapes, slots, device, machines, method)  # type: ignore[arg-type]

    found = of(config)
    helping = [] if found.fits else remedies(config, found, of)
    disk = time = None
    if isinstance(config, Config):
        disk, time = _disk_and_time(config, shapes, found, wished, machines)
    return Planned(name, cluster, shapes, found, helping, disk, time)


def shapes_of(
    config: Config | SupervisedConfig, flow: str | None = None, made: Mapping[str, str] | None = None
) -> dict[str, ModelShape]:
    """Of the models, by role; each name is read once.

    Args:
        config: of the run.
        flow: of a supervised run.
        made: runs that are still to be made -> the model that each starts from, whose shape theirs will have.
    """
    from rlhf_core.data import models_of, pin, resolve_model, supervised_models_of
    from rlhf_core.planning.shape import shape_of

    if isinstance(config, Config):
        specs = models_of(config)
        if not config.scores:
            specs.pop("reward", None)
    else:
        specs = supervised_models_of(config, "dpo" if flow == "dpo" else "sft")
    scoring = {"critic", "reward"} | ({"policy"} if flow == "reward-model" else set())
    known: dict[tuple[str, bool], ModelShape] = {}
    shapes = {}
    for role, spec in specs.items():
        spec = beginning_of(spec, made or {})
        key = (spec, role in scoring)
        if key not in known:
            path = resolve_model(pin(spec, config.storage))
            known[key] = shape_of(path, config.run.trust_remote_code, 1 if role in scoring else None)
        shapes[role] = known[key]
    return shapes


def beginning_of(spec: str, made: Mapping[str, str]) -> str:
    """The model that one begins with which is still to be made; any other itself. ``made``: as of ``shapes_of``."""
    while (run := _run_of(spec)) in made:
        spec = made[run]
    return spec


def machines_of(config: Config | SupervisedConfig, wished: Wished) -> tuple[str, list[Node], Machines]:
    """(what they are called, nodes for the placement, their memory)."""
    import psutil

    from rlhf_cli.configurations import cluster_of
    from rlhf_cli.slot_table import cluster_line
    from rlhf_core.planning.fit import Machines

    described = wished.nodes is not None or wished.gpus is not None
    called, nodes = cluster_of(config, wished.nodes, None, wished.gpus)
    here = wished.nodes in (None, 1) and called != "such a cluster"
    gpu_bytes = wished.gpu_bytes or _memory_of(wished.gpu) or _gpu_bytes_here()
    gpus = int(max((node.gpus for node in nodes), default=0))
    if gpus and not gpu_bytes:
        raise ConfigError(
            "how much memory a GPU has is not known here: give --gpu-memory, such as 80GiB, or --gpu H100"
        )
    node_bytes = wished.node_bytes or (float(psutil.virtual_memory().total) if here and not described else None)
    if node_bytes is None and wished.nodes in (None, 1) and not gpus:
        node_bytes = float(psutil.virtual_memory().total)
    memory = f", {size(gpu_bytes)} a GPU" if gpus and gpu_bytes else ""
    host = f", {size(node_bytes)} of host memory a node" if node_bytes else ""
    machines = Machines(len(nodes), gpus, gpu_bytes or 0.0, node_bytes)
    return f"{called}: {cluster_line(nodes)}{memory}{host}", nodes, machines


def slots_of(
    config: Config | SupervisedConfig, nodes: list[Node]
) -> tuple[Literal["cpu", "gpu"], list[tuple[int, frozenset[str]]]]:
    """(device, slots: GPUs and the roles of the processes in each)."""
    from rlhf_core.cluster.placement import place, place_supervised

    placement = place(config, nodes) if isinstance(config, Config) else place_supervised(config, nodes)
    return placement.device, [
        (slot.gpus, frozenset(name.rpartition("-")[0] for name in slot.shares)) for slot in placement.slots
    ]


def _policy_of(config: Config | SupervisedConfig) -> str:
    return config.actor.model_name_or_path if isinstance(config, Config) else config.model.model_name_or_path


def _run_of(spec: str) -> str:
    """The id in a ``run:`` name; the name itself of any other."""
    from rlhf_core.config.model_spec import is_run_model, parse_run_model

    return parse_run_model(spec).run_id if is_run_model(spec) else spec


def _disk_and_time(
    config: Config, shapes: dict[str, ModelShape], found: Footprint, wished: Wished, machines: Machines
) -> tuple[Disk, IterationTime]:
    from rlhf_core.planning.disk import disk_of
    from rlhf_core.planning.memory import Training
    from rlhf_core.planning.speed import iteration_time

    how = Training(
        ranks=config.actor.world_size,
        zero_stage=config.ds.zero_stage,
        dtype=config.ds.param_dtype,
        tokens=config.data.max_len,
        longest=config.data.max_len,
        chunk=config.ds.logprob_chunk,
        muon=config.actor.optim == "muon",
        lora_rank=config.ds.lora.rank,
    )
    disk = disk_of(config, shapes["policy"], shapes.get("critic"), how)
    speed = _speed(config, found, wished)
    mfu = wished.mfu or (MFU if found.device == "gpu" else CPU_MFU)
    return disk, iteration_time(config, shapes, speed, mfu)


def _speed(config: Config, found: Footprint, wished: Wished) -> Speed:
    from rlhf_core.planning.speed import CORE, GPUS, Speed

    if found.device == "gpu":
        return GPUS[_kind(wished.gpu or _gpu_here() or "H100")]
    processes = sum(found.counts.values())
    cores = max(1, (os.cpu_count() or 1) // max(1, processes if config.overlaps else 1))
    return Speed(f"{count(cores, 'CPU core')}", cores * CORE.flops, cores * CORE.bandwidth)


def _kind(name: str) -> str:
    from rlhf_core.planning.speed import GPUS

    for known in GPUS:
        if known.replace(" ", "").lower() in name.replace(" ", "").lower():
            return known
    raise ConfigError(
        f"--gpu {name!r} is not known: use one of {', '.join(GPUS)}, or --gpu-memory and --mfu with the nearest of them"
    )


def _memory_of(kind: str | None) -> float | None:
    """Of a kind of GPU, as torch reports it."""
    sizes = {"A100": 79.1, "H100": 79.1, "H200": 139.8, "B200": 178.0, "L40S": 44.4, "A10": 22.0, "RTX 4090": 23.5}
    return None if kind is None else sizes[_kind(kind)] * 2**30


def _gpu_here() -> str | None:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def _gpu_bytes_here() -> float | None:
    import torch

    return float(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None


def _place_lines(place: Place) -> Iterator[str]:
    shared = f"{place.count} × {place.name} with {', '.join(place.roles)}"
    limit = "of an unknown size: --node-memory" if place.capacity is None else f"of {size(place.capacity)}"
    verdict = "" if place.fits else f"  DOES NOT FIT, {size(place.peak - (place.capacity or 0))} too much"
    yield f"  {shared}: at most {size(place.peak)} {limit}{verdict}"
    if len(place.phases) > 1:
        yield "    " + ", ".join(f"{phase} {size(held)}" for phase, held in place.phases.items())


def _disk_lines(disk: Disk) -> Iterator[str]:
    total = (
        f"; {size(disk.total)} after {disk.iterations} iterations and {disk.checkpoints} checkpoints"
        if disk.total
        else ""
    )
    yield f"  storage    {size(disk.iteration)} an iteration, {size(disk.checkpoint)} a checkpoint{total}"


def _time_lines(time: IterationTime) -> Iterator[str]:
    overlap = ", overlapping" if time.overlaps else ""
    yield (
        f"  time       about {time.seconds:.3g} s an iteration of {time.samples} samples at full length "
        f"({time.tokens_per_second:,.0f} tokens/s): generation {time.generate:.3g} s, scoring {time.score:.3g} s, "
        f"update {time.update:.3g} s{overlap}"
    )
    yield (
        f"             assumed: {time.speed.name}, {time.speed.flops / 1e12:.3g} TFLOP/s at {time.mfu:.0%} (--mfu), "
        f"{time.speed.bandwidth / 1e9:.0f} GB/s of memory"
    )


def _bytes(option: str, text: str | None) -> float | None:
    """``80GiB`` as bytes; a bare number is GiB."""
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].lower() not in UNITS or float(found[1]) == 0:
        raise ConfigError(f"{option} {text!r} is no size: write it as 80GiB, 512GB or 96000MiB")
    return float(found[1]) * UNITS[found[2].lower()]


def _short(number: int) -> str:
    for amount, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= amount:
            return f"{number / amount:.3g} {letter}"
    return str(number)
