"""Imports point one way, and each heavy library has one home."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("rlhf_core", "tasks", "flows", "rlhf_cli")

HOME = {
    "vllm": "rlhf_core/generation",
    "deepspeed": "rlhf_core/training",
    "peft": "rlhf_core/training",
    "ray": "rlhf_core/cluster",
    "pyarrow": "rlhf_core/storage",
    "mlflow": "rlhf_core/lineage",
    "tensorboard": "rlhf_core/lineage",
    "wandb": "rlhf_core/lineage",
}
HEAVY_IN_FLOWS = ("torch", "ray", "vllm", "deepspeed", "transformers", "pyarrow", "mlflow")

# Top first; a package may import what stands below its line, and nothing on it.
CORE_LINES = [
    ["cluster"],
    ["training", "generation", "report", "planning"],
    ["agents", "rewards", "batching", "weights", "lineage", "data"],
    ["storage", "algorithms", "environments", "vision", "processes"],
    ["config", "telemetry"],
    ["records"],
    ["user_file", "chat_text"],
    ["errors"],
    ["redaction"],
]
LEVEL = {name: depth for depth, line in enumerate(CORE_LINES) for name in line}


def imports(path: Path) -> set[str]:
    """Every module a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("library", sorted(HOME))
def test_one_heavy_library_one_folder(library: str) -> None:
    strangers = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in sources(package)
        if any(name.split(".")[0] == library for name in imports(path))
        and not str(path.relative_to(ROOT)).startswith(HOME[library])
    ]

    assert strangers == []


def test_flows_import_no_heavy_library() -> None:
    heavy = {
        str(path.relative_to(ROOT)): name
        for path in sources("flows")
        for name in imports(path)
        if name.split(".")[0] in HEAVY_IN_FLOWS
    }

    assert heavy == {}


def test_prefect_stays_outside_the_core() -> None:
    knowing = [
        str(path.relative_to(ROOT))
        for path in sources("rlhf_core")
        if any(name.split(".")[0] == "prefect" for name in imports(path))
    ]

    assert knowing == []


def test_core_imports_point_down() -> None:
    upward = [
        (str(path.relative_to(ROOT)), name)
        for package in LEVEL
        for path in [*sources(f"rlhf_core/{package}"), ROOT / f"rlhf_core/{package}.py"]
        if path.exists()
        for name in imports(path)
        if name.startswith("rlhf_core.") and (other := name.split(".")[1]) != package and LEVEL[other] <= LEVEL[package]
    ]

    assert upward == []


def test_layers_of_packages() -> None:
    order = {name: depth for depth, name in enumerate(["rlhf_cli", "flows", "tasks", "rlhf_core"])}
    upward = [
        (str(path.relative_to(ROOT)), name)
        for package in order
        for path in sources(package)
        for name in imports(path)
        if (other := name.split(".")[0]) in order and order[other] < order[package]
    ]

    assert upward == []


def test_there_is_no_utils() -> None:
    assert [path for package in PACKAGES for path in sources(package) if "util" in path.stem] == []
