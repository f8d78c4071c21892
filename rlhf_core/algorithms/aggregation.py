"""From token losses to one number, divided by counts of the *whole optimizer step*.

The caller counts ``num_tokens`` and ``num_sequences`` over all micro-batches and all ranks before the first backward.
Each micro-batch is then a plain summand, so the gradient does not depend on micro-batching, packing or sharding (a
framework that averages gradients over W ranks needs the loss times W).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

AggregationMode = Literal["token", "sample", "constant_length"]


def aggregate(
    loss_BT: Tensor,
    mask_BT: Tensor,
    mode: AggregationMode | str,
    *,
    num_tokens: int,
    num_sequences: int,
    length: int | None = None,
    row_weight_B: Tensor | None = None,
    episode_tokens_B: Tensor | None = None,
) -> Tensor:
    """A scalar that keeps its graph even without action tokens, so that every rank can take part in a backward.

    Args:
        loss_BT: token losses; whatever stands outside the mask, NaN too, does not count.
        mask_BT: bool, action tokens.
        mode: ``token``: ``sum / num_tokens``; ``sample``: sum of the episodes' means ``/ num_sequences``;
            ``constant_length``: ``sum / (num_sequences * length)``.
        num_tokens: action tokens of the optimizer step (see ``count_targets``).
        num_sequences: episodes with action tokens of the optimizer step; rows, where each row is one.
        length: tokens, for ``constant_length``.
        row_weight_B: factor on each row's share; default 1.
        episode_tokens_B: action tokens of the episode that the row is a segment of, for ``sample``: so many segments add up
            to one mean over the episode. Default: each row is an episode.

    Raises:
        ConfigError: an unknown mode, or ``constant_length`` without a length.
    """
    kept_BT = torch.where(mask_BT, loss_BT, 0.0)
    rows_B = kept_BT.sum(dim=1)
    if mode == "sample":
        counts_B = mask_BT.sum(dim=1) if episode_tokens_B is None else episode_tokens_B
        rows_B = rows_B / counts_B.clamp(min=1)
    if row_weight_B is not None:
        rows_B = rows_B * row_weight_B
    return rows_B.sum() / max(_denominator(mode, num_tokens, num_sequences, length), 1)


def count_targets(mask_BT: Tensor) -> tuple[int, int]:
    """(action tokens, rows that have any): add them up over the step and the ranks. For rows that are episodes."""
    return int(mask_BT.sum()), int(mask_BT.any(dim=1).sum())


def masked_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """``[B]`` mean over the action tokens of each row; 0 for a row without any."""
    return torch.where(mask_BT, values_BT, 0.0).sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)


def _denominator(mode: str, num_tokens: int, num_sequences: int, length: int | None) -> int:
    if mode == "token":
        return num_tokens
    if mode == "sample":
        return num_sequences
    if mode != "constant_length":
        raise ConfigError(f"unknown actor.loss_agg_mode={mode!r}: choose token, sample or constant_length")
    if length is None:
        raise ConfigError("actor.loss_agg_mode='constant_length' needs a length: set algo.dr_grpo_length")
    return num_sequences * length
