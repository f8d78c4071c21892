"""A moving average of the policy.

In bf16 its steps, ``1 - beta`` of a difference, are below the resolution and the average never moves; in fp32 it stops
short of the target (at 1.0199926 instead of 1.0199935 in the golden case), so it is kept in fp64 unless memory forbids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlhf_core.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


def start_ema(parameters: Mapping[str, Tensor], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Copies of the parameters in the type that the average is kept in."""
    return {name: parameter.detach().to(dtype, copy=True) for name, parameter in parameters.items()}


def update_ema(average: dict[str, Tensor], parameters: Mapping[str, Tensor], beta: float) -> None:
    """``average = beta * average + (1 - beta) * parameter``, in place, in the type and on the device of the average.

    Raises:
        TrainingError: the names differ.
    """
    if average.keys() != parameters.keys():
        raise TrainingError(
            f"the moving average and the model differ in {sorted(average.keys() ^ parameters.keys())[:5]}: "
            "restart the average from this model"
        )
    for name, parameter in parameters.items():
        average[name].lerp_(parameter.detach().to(average[name]), 1 - beta)
