"""What ``rlhf doctor`` looks at besides what is installed: each check gives findings, each finding its remedy.

::

    machine   packages in their ranges, GPU driver and NCCL, /dev/shm, ulimits, disk, ports
    cluster   Ray's nodes, where it answers
    run       with -c FILE: storage reachable, writable, its clock; models and data readable

A problem keeps runs from working; a warning does so sometimes.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import time
import uuid
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from rlhf_core.config import Config
from rlhf_core.errors import RlhfError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rlhf_cli.stack import Stack
    from rlhf_core.config import SupervisedConfig

PACKAGE = "rlhf-flow"
SHARED_MEMORY_GIB = 1.0  # less, and weights do not fit on their way to the engines
OPEN_FILES = 4096  # Ray, with a few hundred connections of its own, and a connection for every rollout in flight
PROCESSES = 4096
DISK_GIB = 10.0
RAY_FULL = 0.95  # of a disk: from there on Ray refuses to write objects to it
LEAST_DRIVER = 525  # that runs CUDA 12
SKEW_SECONDS = 5.0  # between this machine and the store: leases are judged by wall clocks
ROWS = 3  # of a dataset that are read
NVIDIA_SECONDS = 20

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    subject: str
    text: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        """Plain JSON."""
        return {name: str(value) for name, value in asdict(self).items()}

    @property
    def line(self) -> str:
        """For people."""
        return f"{self.subject}: {self.text}{f': {self.remedy}' if self.remedy else ''}"


def check_machine(home: Path, shared_gib: float, accelerators: Sequence[str]) -> Iterator[Finding]:
    """What does not depend on a run. ``home``: of the stack, which is on the disk that runs write to by default."""
    yield from check_packages(_requirements())
    yield from _gpus(accelerators)
    if shared_gib < SHARED_MEMORY_GIB:
        yield Finding(
            "problem",
            "/dev/shm",
            f"{shared_gib:.1f} GiB free: weights of larger models will not fit on their way to engines",
            "in a container start it with --shm-size=16g (Kubernetes: an emptyDir of medium Memory on /dev/shm)",
        )
    yield from _limits(bool(accelerators))
    yield from _disks(home)


def check_packages(requirements: Sequence[str]) -> Iterator[Finding]:
    """Those that are installed in a version that ours does not work with; ``requirements`` as packaging writes them."""
    from packaging.requirements import Requirement

    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield Finding("problem", requirement.name, "not installed", f"pip install '{requirement}'")
            continue
        if not requirement.specifier.contains(version.partition("+")[0], prereleases=True):
            told = f"version {version} is installed, {PACKAGE} works with {requirement.specifier}"
            yield Finding("problem", requirement.name, told, f"pip install '{requirement}'")


def check_ports(stack: Stack, answers: dict[str, bool]) -> Iterator[Finding]:
    """Ports of the stack that somebody else has."""
    for name in ("prefect", "mlflow", "ray"):
        port = getattr(stack.ports, name)
        if not answers[name] and _taken(port):
            told = f"port {port} is taken by another program, and `rlhf up` would not start"
            yield Finding("problem", name, told, f"stop it, or set RLHF_{name.upper()}_PORT to a free port")


def check_cluster(address: str) -> Iterator[Finding]:
    """What Ray has to give away."""
    from rlhf_cli.slot_table import cluster_line
    from rlhf_core.cluster.connect import connect, disconnect

    try:
        nodes = connect(address)
    except RlhfError as error:
        yield Finding("problem", "Ray", str(error), "start it with `rlhf up`, or correct $RAY_ADDRESS")
        return
    finally:
        disconnect()
    yield Finding("ok", "Ray", cluster_line(nodes))
    if not any(node.gpus for node in nodes) and _driver() is not None:
        yield Finding(
            "warning", "Ray", "has no GPU, though this machine has", "start Ray where torch and nvidia-smi see them"
        )


def check_run(
    config: Config | SupervisedConfig, flow: str | None = None, made: Mapping[str, str] | None = None
) -> Iterator[Finding]:
    """What a run of this configuration needs to reach.

    Args:
        config: of the run.
        flow: of a supervised run.
        made: what the stages before it in a chain make, and so needs not be there yet; as of ``plan.shapes_of``.
    """
    yield from check_storage(config.storage.root, config.storage.options, config.storage.timeout)
    yield from _models(config, flow, made or {})
    yield from _data(config)
    yield from _numbers(config)


def check_storage(root: str, options: dict[str, Any], timeout: float) -> Iterator[Finding]:
    """Reachable, writable, with conditional creates, and a clock like ours."""
    from rlhf_core.storage import ObjectStore

    store = ObjectStore(root, options, timeout)
    path = f".probe/{uuid.uuid4().hex}"
    try:
        store.probe()
        store.put(path, b"now")
        skew = store.modified(path) - time.time()
    except (RlhfError, OSError) as error:
        yield Finding(
            "problem", "storage", str(error), "check storage.root, the credentials in the environment, and the network"
        )
        return
    finally:
        _forget(store, path)
    yield Finding("ok", "storage", f"{store.root} can be written to, and keeps what was written first")
    if abs(skew) > SKEW_SECONDS:
        told = f"its clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this machine's"
        remedy = "run NTP on both; until then set run.lease_seconds to many times that"
        yield Finding("warning", "storage", told, remedy)


def _models(config: Config | SupervisedConfig, flow: str | None, made: Mapping[str, str]) -> Iterator[Finding]:
    from rlhf_cli.plan import beginning_of, shapes_of
    from rlhf_core.data import load_tokenizer, models_of, pin, resolve_model, supervised_models_of

    try:
        shapes = shapes_of(config, flow, made)
    except RlhfError as error:
        yield Finding("problem", "models", str(error), "correct the name, or fetch the model first")
        return
    for role, shape in shapes.items():
        yield Finding("ok", f"model of {role}", f"{shape.name}, {shape.parameters:,} parameters")
    specs = models_of(config) if isinstance(config, Config) else supervised_models_of(config, "sft")
    try:
        load_tokenizer(resolve_model(pin(beginning_of(specs["policy"], made), config.storage)))
    except (RlhfError, OSError, ValueError) as error:
        yield Finding("problem", "tokenizer", str(error), "fetch the model's tokenizer files too")


def _data(config: Config | SupervisedConfig) -> Iterator[Finding]:
    from rlhf_core.data import read_rows

    if isinstance(config, Config):
        named = [(spec, config.data.prompt_split) for spec in config.data.prompt_dataset]
    else:
        named = [(spec, config.data.split) for spec in config.data.dataset]
    named += [(spec, config.eval.split) for spec in config.eval.dataset]
    for spec, split in named:
        try:
            rows = list(islice(read_rows(spec, split), ROWS))
        except (RlhfError, OSError) as error:
            yield Finding("problem", f"data {spec}", str(error), "correct the name, or fetch the data first")
            continue
        if not rows:
            yield Finding("problem", f"data {spec}", "it has no rows", "name another file or split")
        else:
            yield Finding("ok", f"data {spec}", f"readable; columns {', '.join(rows[0].values)}")


def _numbers(config: Config | SupervisedConfig) -> Iterator[Finding]:
    import torch

    from rlhf_core.training.loading import computes_bf16

    on_cpu = config.run.device == "cpu" or (config.run.device == "auto" and not torch.cuda.is_available())
    if on_cpu and config.ds.param_dtype == "bf16" and not computes_bf16():
        told = (
            "ds.param_dtype=bf16, and this CPU has no instructions for it (AVX-512 or AMX): many times slower than fp32"
        )
        yield Finding("warning", "CPU", told, "ds.param_dtype=fp32")


def _gpus(accelerators: Sequence[str]) -> Iterator[Finding]:
    driver = _driver()
    if driver is None:
        return
    major = int(driver.split(".")[0]) if driver.split(".")[0].isdecimal() else None
    if not accelerators:
        yield Finding(
            "problem",
            "GPU",
            f"driver {driver} sees GPUs, torch does not",
            "install the gpu extra (pip install 'rlhf-flow[gpu]'), and look at CUDA_VISIBLE_DEVICES",
        )
        return
    import torch

    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    yield Finding("ok", "GPU", f"driver {driver}, CUDA {torch.version.cuda}, NCCL {nccl}")
    if major is not None and major < LEAST_DRIVER:
        yield Finding(
            "problem", "GPU", f"driver {driver} is older than CUDA {torch.version.cuda} needs", "install a newer driver"
        )


def _limits(gpus: bool) -> Iterator[Finding]:
    limits = [
        ("open files", resource.RLIMIT_NOFILE, OPEN_FILES, "-n"),
        ("processes", resource.RLIMIT_NPROC, PROCESSES, "-u"),
    ]
    for what, kind, least, flag in limits:
        soft, hard = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY and soft < least:
            more = (
                ""
                if hard == resource.RLIM_INFINITY or hard >= least
                else ", which needs an administrator (limits.conf)"
            )
            yield Finding("warning", "ulimit", f"{soft} {what}: long runs need more", f"ulimit {flag} {least}{more}")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if gpus and locked != resource.RLIM_INFINITY and Path("/dev/infiniband").exists():
        yield Finding(
            "warning", "ulimit", "locked memory is limited, and NCCL registers its buffers", "ulimit -l unlimited"
        )


def _disks(home: Path) -> Iterator[Finding]:
    temporary = Path(os.environ.get("RAY_TMPDIR", "/tmp"))  # Ray's own default
    looked_at = {"runs": _existing(home), "Ray's session": _existing(temporary)}
    for what, folder in looked_at.items():
        usage = shutil.disk_usage(folder)
        free, used = usage.free / 2**30, 1 - usage.free / usage.total
        if free < DISK_GIB or (what != "runs" and used > RAY_FULL):
            told = f"{free:.1f} GiB free, {used:.0%} used of the disk of {folder}, for {what}"
            yield Finding(
                "warning", "disk", told, "free some, or set RLHF_HOME (runs, models) or RAY_TMPDIR to another disk"
            )


def _requirements() -> Sequence[str]:
    """Of our own package; none where it was not installed but only found on the path."""
    try:
        return metadata.requires(PACKAGE) or ()
    except metadata.PackageNotFoundError:
        return ()


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    folder = folder.absolute()
    return folder if folder.exists() else _existing(folder.parent)


def _driver() -> str | None:
    """Version of NVIDIA's driver; None without one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    asked = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=NVIDIA_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None


def _taken(port: int) -> bool:
    """True if somebody listens there on loopback."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _forget(store: Any, path: str) -> None:
    try:
        store.delete(path)
    except (RlhfError, OSError):
        return  # it was not written, or the store is gone: that is told already


def memory_gib() -> float:
    """Of this machine."""
    return float(psutil.virtual_memory().total) / 2**30
