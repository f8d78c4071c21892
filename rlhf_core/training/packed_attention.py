"""Attention over samples that share a row: each by itself, so that the work is the sum of their squares, not the row's square.

::

    q, k, v [1, heads, N, D] ─ split at the bounds of the samples ─▶ SDPA of each, causal ─ join ─▶ [1, N, heads, D]

Transformers' own SDPA path would compute the whole square under a block-diagonal mask, by a slow kernel. FlashAttention takes
the bounds of the samples itself, and needs nothing of this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rlhf_core.errors import TrainingError
from rlhf_core.training.sequence_parallel import over_heads

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from rlhf_core.config.trained import DeepSpeedConfig

PACKED_SDPA = "packed_sdpa"  # with "sdpa" in it, Transformers asks the model whether it supports SDPA
FLASH_ATTENTIONS = ("flash_attention_2", "flash_attention_3")


def attention_of(ds: DeepSpeedConfig) -> str:
    """The name of the attention that a model is loaded with."""
    return PACKED_SDPA if ds.packing_samples and ds.attn_implementation == "sdpa" else ds.attn_implementation


def packed_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of Transformers: ``[1, heads, N, D]`` each, to ``[1, N, heads, D]``.

    Args:
        module: the layer.
        query: of all samples.
        key: as ``query``.
        value: as ``query``.
        attention_mask: there is none.
        cu_seq_lens_q: where samples begin, and N: what the backbone was given.
        sliding_window: tokens that a token sees, itself included; None: all of its sample before it.
        settings: scaling and the like.

    Raises:
        TrainingError: the model did not hand the bounds on.
    """
    if cu_seq_lens_q is None:
        raise TrainingError(
            f"{type(module).__name__} is not told where the samples of a packed row begin: set ds.packing_samples=false"
        )
    lengths = cu_seq_lens_q.diff().tolist()
    parts = zip(*(whole.split(lengths, dim=2) for whole in (query, key, value)), strict=True)
    attended = [
        sdpa_attention_forward(module, q, k, v, _window_mask(q.shape[2], sliding_window, q.device), **settings)[0]
        for q, k, v in parts
    ]
    return torch.cat(attended, dim=1), None


def packed_mask(*, config: PretrainedConfig, local_size: int | None = None, use_vmap: bool = False, **_: Any) -> None:
    """A mask function of Transformers: none is needed, for ``packed_sdpa`` is causal and gets the window from the layer.

    Raises:
        TrainingError: the model asks for another pattern.
    """
    if use_vmap or local_size not in (None, getattr(config, "sliding_window", None)):
        raise TrainingError(
            f"{type(config).__name__} has attention that is neither causal nor a sliding window, which packed rows do not "
            "have: set ds.packing_samples=false"
        )


def _window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """bool ``[1, 1, length, length]``; None where plain causal attention says the same."""
    if window is None or length <= window:
        return None
    visible = torch.ones((length, length), dtype=torch.bool, device=device)
    return visible.tril().triu(1 - window)[None, None]


AttentionInterface.register(PACKED_SDPA, over_heads(packed_sdpa))
for flash in FLASH_ATTENTIONS:  # as they are, but where a row is divided over ranks
    AttentionInterface.register(flash, over_heads(flash_attention_forward))
AttentionMaskInterface.register(PACKED_SDPA, packed_mask)
