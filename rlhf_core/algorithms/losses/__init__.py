"""The policy losses by name (``actor.policy_loss_type``). A new one is one short file and one line here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.algorithms.losses.base import LossInput, LossOutput
from rlhf_core.algorithms.losses.cispo import cispo_loss
from rlhf_core.algorithms.losses.gspo import gspo_loss
from rlhf_core.algorithms.losses.ppo import ppo_loss
from rlhf_core.algorithms.losses.value import ValueLossInput, ValueLossOutput, value_loss
from rlhf_core.algorithms.registry import look_up, register

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "POLICY_LOSSES",
    "LossInput",
    "LossOutput",
    "ValueLossInput",
    "ValueLossOutput",
    "policy_loss_named",
    "register_policy_loss",
    "value_loss",
]

POLICY_LOSSES: dict[str, Callable[[LossInput], LossOutput]] = {
    "ppo": ppo_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
}


def policy_loss_named(name: str) -> Callable[[LossInput], LossOutput]:
    """The loss of that name; an unknown name is a ``ConfigError``."""
    return look_up(POLICY_LOSSES, "policy loss", name)


def register_policy_loss(name: str, loss: Callable[[LossInput], LossOutput]) -> None:
    """Add a user's own loss; a name that is taken is a ``ConfigError``."""
    register(POLICY_LOSSES, "policy loss", name, loss)
