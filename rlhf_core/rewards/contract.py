"""What a user's reward function is called with, how it is marked, and how a configuration names it.

A function is called with three lists of equal length, positionally, as in OpenRLHF::

    def reward_func(queries, prompts, labels, **kwargs): ...

    queries   list[str]   prompt + answer
    prompts   list[str]
    labels    list[Any]   JSON values, None where the row has no label

A parameter named ``answers`` or ``datasources`` gets that list too; ``args`` of the configuration arrive as keyword
arguments. The call holds up to ``reward.batch_size`` samples, or, with ``@group_wise``, exactly the samples of one
group. What it may answer is in ``answers.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Function = TypeVar("Function", bound="Callable[..., Any]")

DEFAULT_NAME = "reward_func"
OPTIONAL_COLUMNS = ("answers", "datasources")
_GROUP_WISE = "__rlhf_group_wise__"


def group_wise(function: Function) -> Function:
    """Mark a reward function that compares the samples of a prompt: it is called once per group, with all of it."""
    setattr(function, _GROUP_WISE, True)
    return function


def is_group_wise(function: Callable[..., Any]) -> bool:
    """True if the function is marked ``@group_wise``."""
    return getattr(function, _GROUP_WISE, False) is True


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """One reward function as the configuration names it. Crosses to the workers as JSON."""

    key: str  # the configuration key of `use`, for messages
    use: str  # a built-in, path.py, path.py:function or package.module:function
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """``key=value``, as messages begin."""
        return f"{self.key}={self.use!r}"

    @property
    def args_place(self) -> str:
        """``key=value`` of the arguments, or of the function where it has none."""
        return f"{self.key.removesuffix('.use')}.args={self.args!r}" if self.args else self.place
