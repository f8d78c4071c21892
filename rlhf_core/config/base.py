"""What every section is made of: bounded types, and a frozen model that refuses unknown keys."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def _comma_floats(value: Any) -> Any:
    """``"0.1,0.9"`` as OpenRLHF users write it, as a list."""
    if isinstance(value, str):
        return [float(part) for part in value.split(",") if part.strip()]
    return [float(value)] if isinstance(value, int | float) else value


def _comma_strings(value: Any) -> Any:
    """``"a.jsonl,b.jsonl"`` as OpenRLHF users write it, as a list; nothing (``key=``) is an empty list."""
    if value is None:
        return []
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


FloatList = Annotated[tuple[float, ...], BeforeValidator(_comma_floats)]
StringList = Annotated[tuple[str, ...], BeforeValidator(_comma_strings)]


class Section(BaseModel):
    """A frozen group of keys: unknown keys are refused, docstrings under the fields become their descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())
