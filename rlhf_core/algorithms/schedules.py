"""The learning rate over the optimizer steps of a run, as a factor on its peak. Pure: a resume needs only the step."""

from __future__ import annotations

import math
from typing import Literal

from rlhf_core.errors import ConfigError

ScheduleKind = Literal["constant", "linear", "cosine", "cosine_with_min_lr"]


def lr_factor(step: int, total_steps: int, warmup_steps: int, min_ratio: float, kind: ScheduleKind | str) -> float:
    """Factor at optimizer step ``step`` (from 0): linear warm-up from 0, then the decay, then its floor for ever.

    Args:
        step: steps already taken.
        total_steps: where the decay ends.
        warmup_steps: steps of the warm-up; with any, step 0 has factor 0.
        min_ratio: floor of ``cosine_with_min_lr``; the floor of ``linear`` and ``cosine`` is 0.
        kind: shape of the decay.

    Raises:
        ConfigError: no such schedule.
    """
    if kind not in ("constant", "linear", "cosine", "cosine_with_min_lr"):
        raise ConfigError(f"unknown actor.lr_scheduler={kind!r}: choose constant, linear, cosine or cosine_with_min_lr")
    if step < warmup_steps:
        return step / warmup_steps
    progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    if kind == "constant":
        return 1.0
    if kind == "linear":
        return 1.0 - progress
    floor = min_ratio if kind == "cosine_with_min_lr" else 0.0
    return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2
