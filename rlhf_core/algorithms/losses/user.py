"""A loss of a user's file: its answer is looked at before a gradient is made of it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

from rlhf_core.algorithms.losses.base import LossInput, LossOutput, PolicyLoss
from rlhf_core.errors import TrainingError


@dataclass(frozen=True, slots=True)
class UserLoss:
    """Called like the built-in ones."""

    name: str  # path.py:name
    loss: PolicyLoss

    def __call__(self, inputs: LossInput) -> LossOutput:
        """What the user's function answers.

        Raises:
            TrainingError: it is no ``LossOutput``, or its tensors have other shapes. A loss that is one number would
                else be spread over all tokens in silence.
        """
        output = self.loss(inputs)
        if not isinstance(output, LossOutput):
            raise TrainingError(
                f"policy loss {self.name!r} returned a {type(output).__name__}: return a LossOutput "
                "(loss_output(inputs, loss_BT, ratio_BT, clipped_BT) makes one)"
            )
        for field in fields(output):
            value = getattr(output, field.name)
            wanted = tuple(inputs.mask_BT.shape) if field.name == "loss_BT" else ()
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            if found != wanted:
                raise TrainingError(
                    f"policy loss {self.name!r} returned {field.name} as {found}: make it a tensor of shape {wanted}"
                )
        return output
