"""Find the function that a configuration names, and check that it can be called. Loads only in the worker."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import ConfigError
from rlhf_core.rewards.builtins import BUILTINS
from rlhf_core.rewards.contract import DEFAULT_NAME, OPTIONAL_COLUMNS, FunctionSpec, is_group_wise
from rlhf_core.user_file import describe, module_from_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType


@dataclass(frozen=True, slots=True)
class LoadedFunction:
    """A function that is ready to be called."""

    function: Callable[..., Any]
    args: Mapping[str, Any]
    columns: tuple[str, ...]  # the optional columns it asks for by name

    @property
    def group_wise(self) -> bool:
        """True if a call must hold exactly one group."""
        return is_group_wise(self.function)

    def __call__(self, call: Mapping[str, Sequence[Any]]) -> Any:
        """Whatever the function answers for the columns of a call."""
        wanted = {name: call[name] for name in self.columns}
        return self.function(call["queries"], call["prompts"], call["labels"], **wanted, **self.args)


def load_function(spec: FunctionSpec) -> LoadedFunction:
    """The function of a spec. ``ConfigError`` if there is none, or it cannot be called with its ``args``."""
    function = _find(spec)
    if not callable(function):
        raise ConfigError(f"{spec.place}: is of type {type(function).__name__}, not a function")
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"{spec.place}: is an async function; it runs in a process of its own, so make it a plain one"
        )
    try:
        return _bind(function, spec.args)
    except Exception as error:
        form = "f(queries, prompts, labels, **args)"
        raise ConfigError(f"{spec.args_place}: {spec.use} cannot be called as {form}: {error}") from error


def default_name(use: str) -> str:
    """The name of a function in the metrics: its own, or its file's where that is ``reward_func``."""
    module, name = _split(use)
    if name == DEFAULT_NAME and module:
        return Path(module).stem if module.endswith(".py") else module.rpartition(".")[2]
    return name


def _find(spec: FunctionSpec) -> Any:
    module_name, name = _split(spec.use)
    if not module_name:
        if name not in BUILTINS:
            raise ConfigError(
                f"{spec.place}: no such built-in; use one of {', '.join(BUILTINS)}, "
                "a file 'path.py' or 'path.py:function', or 'package.module:function'"
            )
        return BUILTINS[name]
    if module_name.endswith(".py"):
        module = module_from_file(Path(module_name).expanduser().resolve(), spec.place)
    else:
        module = _load_module(spec, module_name)
    try:
        return getattr(module, name)
    except AttributeError:
        raise ConfigError(f"{spec.place}: no function {name!r} in {module_name}") from None


def _split(use: str) -> tuple[str, str]:
    """(file or module, function); the first is empty for a built-in."""
    if use.endswith(".py"):
        return use, DEFAULT_NAME
    module, _, name = use.rpartition(":")
    return module, name


def _load_module(spec: FunctionSpec, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{spec.place}: the module cannot be imported: {describe(error)}") from error


def _bind(function: Callable[..., Any], args: Mapping[str, Any]) -> LoadedFunction:
    """Raise whatever is wrong with the arguments. A built-in is also tried on no samples, which checks their values."""
    signature = inspect.signature(function)
    loaded = LoadedFunction(function, args, tuple(name for name in OPTIONAL_COLUMNS if name in signature.parameters))
    signature.bind([], [], [], **{name: [] for name in loaded.columns}, **args)
    if function in BUILTINS.values():
        loaded({name: [] for name in ("queries", "prompts", "labels", *OPTIONAL_COLUMNS)})
    return loaded
