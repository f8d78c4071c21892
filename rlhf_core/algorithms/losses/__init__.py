"""The policy losses by name (``actor.policy_loss_type``). A new one is one short file and one line here."""

from __future__ import annotations

from rlhf_core.algorithms.losses.base import LossInput, LossOutput, PolicyLoss, loss_output
from rlhf_core.algorithms.losses.cispo import cispo_loss
from rlhf_core.algorithms.losses.gspo import gspo_loss
from rlhf_core.algorithms.losses.ppo import ppo_loss, token_ratio
from rlhf_core.algorithms.losses.user import UserLoss
from rlhf_core.algorithms.losses.value import ValueLossInput, ValueLossOutput, value_loss
from rlhf_core.algorithms.registry import look_up
from rlhf_core.errors import ConfigError
from rlhf_core.user_file import FROM_FILE, object_from_file

__all__ = [
    "POLICY_LOSSES",
    "LossInput",
    "LossOutput",
    "PolicyLoss",
    "ValueLossInput",
    "ValueLossOutput",
    "loss_output",
    "policy_loss_named",
    "token_ratio",
    "value_loss",
]

KEY = "actor.policy_loss_type"

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": ppo_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
}


def policy_loss_named(name: str) -> PolicyLoss:
    """The loss of that name, or the one of a user's file: ``path.py:name``.

    Raises:
        ConfigError: no such name; no such file; it cannot be imported; or what it holds cannot be called.
    """
    if not FROM_FILE.fullmatch(name):
        return look_up(POLICY_LOSSES, "policy loss", name)
    loss = object_from_file(KEY, name)
    if not callable(loss):
        raise ConfigError(
            f"{KEY}={name!r} is of type {type(loss).__name__}: make it a function from LossInput to LossOutput "
            "(rlhf_core.algorithms.losses)"
        )
    return UserLoss(name, loss)
