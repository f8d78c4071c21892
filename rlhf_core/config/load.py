"""From a YAML file, its parents (``extends:``) and dotted overrides to a checked ``Config``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from rlhf_core.config.chain import ChainConfig
from rlhf_core.config.model import Config
from rlhf_core.config.retrain import RetrainConfig
from rlhf_core.config.supervised import SupervisedConfig
from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Tree = TypeVar("Tree", Config, SupervisedConfig, ChainConfig, RetrainConfig)
Kind: TypeAlias = Literal["rewards", "supervised", "chain", "retrain"]

EXTENDS = "extends"


class _Loader(yaml.SafeLoader):
    """YAML 1.2's reading of ``1e-6`` as a number; duplicate keys are an error rather than the last one winning."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    mapping: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if not isinstance(key, Hashable):
            raise ConfigError(f"line {line}: {key!r} cannot be a key: write a name")
        if key in mapping:
            raise ConfigError(f"line {line}: key {key!r} stands twice: remove one")
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """The checked configuration of a run by rewards: a file with overrides on top.

    Args:
        path: a YAML file, or the name of one in ``configs/``.
        overrides: ``section.key=value``; the value is read as YAML.

    Raises:
        ConfigError: with every problem found, each naming key, value and remedy.
    """
    return parse_config(read_yaml(path), overrides, source=str(path))


def load_supervised_config(path: str | Path, overrides: Iterable[str] = ()) -> SupervisedConfig:
    """The same for a run of SFT, reward-model training or DPO."""
    return parse_supervised_config(read_yaml(path), overrides, source=str(path))


def load_chain_config(path: str | Path, overrides: Iterable[str] = ()) -> ChainConfig:
    """The stages of a chain. Their configurations are looked at by ``plan_chain``.

    Args:
        path: as ``load_config``. A stage's ``config`` that lies beside this file is found there.
        overrides: ``section.key=value`` for every stage, ``NAME:section.key=value`` for one; on top of all the file says.

    Raises:
        ConfigError: with every problem found.
    """
    chain = _parse(ChainConfig, read_yaml(path), (), str(path))
    folder = _find(path).parent
    stages = tuple(stage.model_copy(update={"config": _beside(folder, stage.config)}) for stage in chain.stages)
    return chain.model_copy(update={"stages": stages}).with_overrides(overrides)


def parse_chain_config(data: Mapping[str, Any], overrides: Iterable[str] = ()) -> ChainConfig:
    """The same for a mapping."""
    return _parse(ChainConfig, data, (), "the chain").with_overrides(overrides)


def load_retrain_config(path: str | Path, overrides: Iterable[str] = ()) -> RetrainConfig:
    """A retraining. What its turns train is looked at by ``plan_turn``.

    Args:
        path: as ``load_config``. A ``config`` that lies beside this file is found there.
        overrides: ``key=value`` of the retraining itself (``margin=0.1``, ``approval.enable=true``), or ``section.key=value``
            of what it trains, on top of all the file says.

    Raises:
        ConfigError: with every problem found.
    """
    retraining = _parse_retraining(read_yaml(path), overrides, str(path))
    return retraining.model_copy(update={"config": _beside(_find(path).parent, retraining.config)})


def parse_retrain_config(data: Mapping[str, Any], overrides: Iterable[str] = ()) -> RetrainConfig:
    """The same for a mapping."""
    return _parse_retraining(data, overrides, "the retraining")


def _parse_retraining(data: Mapping[str, Any], overrides: Iterable[str], source: str) -> RetrainConfig:
    own: list[str] = []
    trained: list[str] = []
    for override in overrides:
        section = override.partition("=")[0].strip().removeprefix("--").partition(".")[0]
        (own if section in RetrainConfig.model_fields else trained).append(override)
    retraining = _parse(RetrainConfig, data, own, source)
    return retraining.model_copy(update={"overrides": (*retraining.overrides, *trained)})


def kind_of(data: Mapping[str, Any]) -> Kind:
    """What a file is for, by its sections."""
    if "stages" in data:
        return "chain"
    if "config" in data:
        return "retrain"
    return "supervised" if "model" in data and "actor" not in data else "rewards"


def parse_config(data: Mapping[str, Any], overrides: Iterable[str] = (), source: str = "the configuration") -> Config:
    """The checked configuration of a mapping with overrides on top."""
    return _parse(Config, data, overrides, source)


def parse_supervised_config(
    data: Mapping[str, Any], overrides: Iterable[str] = (), source: str = "the configuration"
) -> SupervisedConfig:
    """The same for a run of SFT, reward-model training or DPO."""
    return _parse(SupervisedConfig, data, overrides, source)


def _parse(schema: type[Tree], data: Mapping[str, Any], overrides: Iterable[str], source: str) -> Tree:
    tree = apply_overrides(data, overrides)
    try:
        return schema.model_validate(tree)
    except ConfigError as error:
        raise ConfigError(f"{source}:\n{error}") from None
    except ValidationError as error:
        lines = "\n".join(_explain(dict(item), schema) for item in error.errors())
        raise ConfigError(f"{source}:\n{lines}") from None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A file merged over the files it extends (nearest wins)."""
    return _read(_find(path), seen=())


def apply_overrides(data: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of ``data`` with ``a.b.c=value`` entries set."""
    tree = _merge({}, data)
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"override {override!r}: write it as section.key=value")
        try:
            value = yaml.load(text, Loader=_Loader)
        except yaml.YAMLError:
            value = text
        node = tree
        *sections, name = key.strip().removeprefix("--").split(".")
        for section in sections:
            child = node.setdefault(section, {})
            if not isinstance(child, dict):
                raise ConfigError(f"override {override!r}: {section!r} is a value, not a section")
            node = child
        node[name] = value
    return tree


def _find(path: str | Path) -> Path:
    candidates = [Path(path), Path("configs") / path, Path("configs") / f"{path}.yaml"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise ConfigError(f"no configuration file {str(path)!r} (looked at {', '.join(map(str, candidates))})")


def _beside(folder: Path, config: str | dict[str, Any]) -> str | dict[str, Any]:
    """A file's path where it lies in ``folder``; anything else as it is."""
    if isinstance(config, str) and (folder / config).is_file():
        return str(folder / config)
    return config


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in seen:
        raise ConfigError(f"{path}: `extends` goes in a circle")
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not readable YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, found {type(data).__name__}")
    merged: dict[str, Any] = {}
    for parent in _parents(path, data.pop(EXTENDS, [])):
        target = path.parent / parent
        if not target.is_file():
            raise ConfigError(f"{path}: `extends: {parent}` names no file ({target})")
        merged = _merge(merged, _read(target, (*seen, path.resolve())))
    return _merge(merged, data)


def _parents(path: Path, named: Any) -> list[str]:
    parents = [named] if isinstance(named, str) else named
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise ConfigError(f"{path}: `extends: {named!r}`: name a file, or a list of files")
    return parents


def _merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        if isinstance(value, dict):
            merged[key] = _merge(below if isinstance(below, dict) else {}, value)
        else:
            merged[key] = value
    return merged


def _explain(error: dict[str, Any], schema: type[BaseModel]) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if not key:  # a rule across fields: its message says everything
        return str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        plain = ".".join(part for part in error["loc"] if isinstance(part, str))  # without positions in lists
        near = difflib.get_close_matches(plain, _all_keys(schema), n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else "see docs/configuration.md for the keys"
        return f"unknown key {key!r}: {hint}"  # without its value, which may be a credential
    if error["type"] == "missing":
        return f"{key} is missing: set it"
    remedy = {"tuple_type": ": write a list, such as [] or [a, b]", "string_type": ": put the text in quotes"}
    return f"{key}={error.get('input')!r}: {error['msg']}{remedy.get(error['type'], '')}"


def _all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        for kind in (field.annotation, *get_args(field.annotation)):  # a section, or a list of them
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys.extend(_all_keys(kind, f"{prefix}{name}."))
    return keys
