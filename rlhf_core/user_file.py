"""Python files of the user's that the configuration names, and what ``path.py:name`` names in them."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from types import ModuleType

MAX_ERROR = 500  # characters of an error that are kept

FROM_FILE = re.compile(r".+\.py:\w+")


def object_from_file(key: str, value: str) -> Any:
    """The object that ``key=value`` names; its file is imported once per process.

    Args:
        key: dotted key of the configuration, for the messages.
        value: matches ``FROM_FILE``; a relative path starts in the current folder, which in every worker process is
            that of the controller.

    Raises:
        ConfigError: no such file, it cannot be imported, or nothing in it has that name.
    """
    place = f"{key}={value!r}"
    file, _, name = value.rpartition(":")
    path = Path(file).expanduser().resolve()
    module = module_from_file(path, place)
    if name not in vars(module):
        raise ConfigError(f"{place}: nothing in {path} is called {name!r}")
    return vars(module)[name]


def module_from_file(path: Path, place: str) -> ModuleType:
    """The module of a file, imported once per process.

    Args:
        path: absolute.
        place: what named it, for the messages.

    Raises:
        ConfigError: no such file, or it cannot be imported.
    """
    # The name holds a digest of the path: two files of one name must not replace each other.
    name = f"rlhf_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"{place}: no such file: {path}; a relative path starts in the folder of the controller")
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # files beside it can be imported, but hide nothing that is installed
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]  # half a module must not be found by the next one who asks
        raise ConfigError(f"{place}: the file cannot be imported: {describe(error)}") from error
    return module


def describe(error: BaseException) -> str:
    """``ValueError: text (file.py:12)``: what was raised, and where; long texts are cut."""
    frames = traceback.extract_tb(error.__traceback__)
    known = isinstance(error, SyntaxError) or not frames  # the text of a SyntaxError ends with file and line
    place = "" if known else f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
    return f"{type(error).__name__}: {error}"[: MAX_ERROR - len(place)] + place
