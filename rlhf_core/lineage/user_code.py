"""Which Python files of the user's a run loads, and what is in them: rewards, estimators, losses, tasks, data.

::

    configuration ─▶ "rewards.py:score", "my.rewards:score" ─▶ file ─▶ files beside it that it imports ─▶ path: sha256

The revision of this software's own code says nothing of them. What is installed is told by the versions of packages.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.storage.digest import sha256_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_FILE = re.compile(r"(?P<path>.+\.py)(:\w+)?(\?.*)?", re.DOTALL)
_MODULE = re.compile(r"(?P<module>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")
_OURS = Path(__file__).resolve().parents[2]
_OUR_PACKAGES = ("rlhf_core", "rlhf_cli", "flows")  # of that folder; told by the code revision


def user_code(config: Mapping[str, Any], folder: Path | None = None) -> dict[str, str]:
    """sha256 of every Python file that the configuration names, and of those it imports from beside it or from ``folder``.

    Args:
        config: as a tree of plain values.
        folder: where relative paths start, and modules are looked for; default: the current one, as the workers have it.

    Returns:
        Path, relative to ``folder`` where it lies below it -> hex sha256. Files that are not there are left out: whoever
        loads them says so.
    """
    home = (folder or Path.cwd()).resolve()
    found: dict[Path, bytes] = {}
    waiting = [path for value in _texts(config) for path in _named(value, home)]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = path.read_bytes()
        waiting += _imported(path, found[path], home)
    return {_shown(path, home): sha256_of(data) for path, data in sorted(found.items())}


def changed_code(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What became of each file, in words; empty if nothing did."""
    lines = []
    for path in sorted(before.keys() | now.keys()):
        if path not in now:
            lines.append(f"{path} is not used any more")
        elif path not in before:
            lines.append(f"{path} is new")
        elif before[path] != now[path]:
            lines.append(f"{path} was altered")
    return lines


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _named(text: str, home: Path) -> list[Path]:
    """The file that a value of the configuration names, if it names one."""
    if file := _FILE.fullmatch(text):
        try:
            path = (home / Path(file["path"]).expanduser()).resolve()
            return [path] if path.is_file() else []
        except (OSError, RuntimeError, ValueError):  # a text that only looks like a path
            return []
    if module := _MODULE.fullmatch(text):
        return _module_files(module["module"].split("."), [home])
    return []


def _imported(path: Path, data: bytes, home: Path) -> Iterator[Path]:
    """Files that the file imports from beside it or from the project's folder, by its text: nothing is run."""
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _module_files(alias.name.split("."), [path.parent, home])
        elif isinstance(node, ast.ImportFrom):
            places = [path.parents[node.level - 1]] if 0 < node.level <= len(path.parents) else [path.parent, home]
            module = node.module.split(".") if node.module else []
            for alias in node.names:
                yield from _module_files([*module, alias.name], places)


def _module_files(names: list[str], places: list[Path]) -> list[Path]:
    """The files that importing ``a.b.c`` runs, from the first place that has them; ``c`` may be a name within ``a.b``."""
    for place in places:
        files, folder = [], place
        for name in names:
            module, package = folder / f"{name}.py", folder / name / "__init__.py"
            if package.is_file():
                files.append(package)
            elif module.is_file():
                files.append(module)
                break
            elif not (folder / name).is_dir():
                break
            folder = folder / name
        if files:
            return [file.resolve() for file in files if not _is_ours(file.resolve())]
    return []


def _is_ours(path: Path) -> bool:
    return any(path.is_relative_to(_OURS / package) for package in _OUR_PACKAGES)


def _shown(path: Path, home: Path) -> str:
    return path.relative_to(home).as_posix() if path.is_relative_to(home) else path.as_posix()
