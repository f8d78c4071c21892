"""Mixtures of experts under ZeRO-3.

ZeRO-3 gathers a module's parameters when its forward pass begins: a collective. Where each expert is a module of its own, a
rank runs those that its tokens were routed to, and waits for the others' gathers for ever. DeepSpeed's remedy is a leaf: it
gathers all that lies below it at once, and hooks nothing there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator


def expert_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Blocks whose experts are modules in a list. Those of Transformers 5 are slices of one parameter, and need nothing."""
    for block in module.modules():
        lists = (name for name, child in block.named_children() if isinstance(child, nn.ModuleList))
        if any("expert" in name for name in lists):
            yield block


def gather_experts_together(module: nn.Module) -> None:
    """Make a leaf of each of them; before DeepSpeed shards the model."""
    from deepspeed.utils import set_z3_leaf_module

    for block in expert_blocks(module):
        set_z3_leaf_module(block, True)
