"""``docs/configuration.md``, made from the schema: ``python -m rlhf_core.config.document FILE``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from rlhf_core.config.chain import ChainConfig, StageConfig
from rlhf_core.config.model import Config
from rlhf_core.config.retrain import RetrainConfig
from rlhf_core.config.supervised import SupervisedConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic.fields import FieldInfo

HEAD = """# Configuration

Every key, from the schema (`make docs` writes this page). Keys are dotted paths: in a file they are nested YAML, on the
command line `section.key=value`. A file may build on others: `extends: other.yaml`. An unknown key, an impossible value or a
combination that cannot work is refused before anything starts.
"""

SUPERVISED_HEAD = """# SFT, reward models and DPO

A file for `rlhf sft`, `rlhf reward-model` or `rlhf dpo` has the sections below; `ds`, `ckpt`, `logger`, `storage` and `run` are
those above, and an iteration is `train.steps_per_iteration` optimizer steps.
"""

CHAIN_HEAD = """# Chains

A file for `rlhf chain`, which runs several of the above one after the other: [rlhf.md](rlhf.md). On the command line
`section.key=value` is set in every stage, `NAME:section.key=value` in one.

| key | default | meaning |
|---|---|---|"""


RETRAIN_HEAD = """# Retraining

A file for `rlhf retrain`: what each turn trains, and when its model is promoted: [retraining.md](retraining.md). On the command
line `key=value` is of these keys, `section.key=value` of what is trained.

| key | default | meaning |
|---|---|---|"""


def render() -> str:
    """The page."""
    lines = [HEAD]
    for name, field in Config.model_fields.items():
        lines += _section(name, field)
    lines.append(SUPERVISED_HEAD)
    for name, field in SupervisedConfig.model_fields.items():
        if field.annotation is not getattr(Config.model_fields.get(name), "annotation", None):
            lines += _section(name, field)
    lines.append(CHAIN_HEAD)
    common = ChainConfig.model_fields["common"]
    lines.append(_row("common", common.default, common.description or ""))
    lines += [_row(*entry) for entry in _fields(StageConfig, "stages.", None)]
    lines.append(RETRAIN_HEAD)
    lines += [_row(*entry) for entry in _fields(RetrainConfig, "", None)]
    return "\n".join([*lines, ""])


def _section(name: str, field: FieldInfo) -> list[str]:
    """A heading and the table of its keys."""
    section = field.annotation
    assert isinstance(section, type), "the sections of a run are models"
    defaults = None if field.is_required() else field.get_default(call_default_factory=True)
    return [
        f"## `{name}`: {(field.description or '').rstrip('.')}",
        "",
        "| key | default | meaning |",
        "|---|---|---|",
        *(_row(*entry) for entry in _fields(section, f"{name}.", defaults)),
        "",
    ]


def _fields(model: type[BaseModel], prefix: str, defaults: BaseModel | None) -> Iterator[tuple[str, Any, str]]:
    """(key, default, meaning); ``defaults`` is the section as it is where nobody sets anything."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        default = field.get_default(call_default_factory=True) if defaults is None else getattr(defaults, name)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _fields(kind, f"{prefix}{name}.", default)
        else:
            yield f"{prefix}{name}", default, field.description or ""


def _row(key: str, default: Any, meaning: str) -> str:
    shown = "required" if default is PydanticUndefined else f"`{json.dumps(default)}`"
    text = " ".join(meaning.split()).replace("|", "\\|").replace("``", "`")
    return f"| `{key}` | {shown} | {text} |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
