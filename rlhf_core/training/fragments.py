"""Where DeepSpeed keeps a parameter's master weights and optimizer states on this rank, whatever the ZeRO stage.

::

    parameter  [----------------------------]   flat, its elements in order
    fragment            [---------]             those this rank holds: views of DeepSpeed's own tensors, to read or to overwrite
                        start ─▶

Without ZeRO every rank holds all of them whole. Where layers are divided over ranks, "the parameter" is the part of it that
this rank has. No function here talks to other ranks, but ``refresh_parameters``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from rlhf_core.training.tensor_parallel import cut_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from rlhf_core.training.tensor_parallel import Cut

MASTER = "fp32"  # the master weight itself, among the kinds of an optimizer's numbers
STEP = "step"  # AdamW's: one number for all elements
MOMENTUM = "momentum_buffer"  # Muon's


@dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    """The elements of one parameter that this rank holds."""

    name: str  # Hugging Face's
    numel: int  # of the whole parameter
    start: int  # of the first element, in the whole flat parameter
    key: torch.Tensor  # the optimizer files its states under this tensor
    offset: int  # of the first element, in ``key``
    length: int
    replicated: bool = False  # every rank holds the same
    cut: Cut | None = None  # the part of the parameter whose elements these are; None: all of it

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """``[length]``, a view: this fragment's part of a tensor laid out as ``key`` is."""
        return whole.detach().view(-1).narrow(0, self.offset, self.length)


@dataclass(frozen=True, slots=True)
class WholeMomentum:
    """Muon under ZeRO 1 and 2: a rank keeps the momentum whole of every matrix of which it holds a fragment."""

    name: str
    numel: int
    key: torch.Tensor  # as of a ``Fragment``
    offset: int  # in the buffer filed under ``key``
    size: int  # of that buffer
    saved_here: bool  # this rank, of those that hold it, writes it


def fragments(hf_model: PreTrainedModel, optimizer: Any) -> Iterator[Fragment]:
    """Of every parameter that is trained, as far as this rank holds it.

    Args:
        hf_model: after ``deepspeed.initialize``.
        optimizer: DeepSpeed's, or the plain one where DeepSpeed has none of its own.
    """
    masters = replicated_masters(optimizer)
    for name, parameter in hf_model.named_parameters():
        if not parameter.requires_grad:
            continue
        if hasattr(parameter, "ds_id"):
            yield from _of_sharded_parameter(name, parameter, optimizer)
        elif hasattr(parameter, "_hp_mapping"):
            for fragment in _of_flat_groups(name, parameter, optimizer):
                yield replace(fragment, cut=cut_of(parameter))
        else:
            master, numel = masters.get(id(parameter), parameter), parameter.numel()
            yield Fragment(name, numel, 0, master, 0, numel, replicated=True, cut=cut_of(parameter))


def whole_momenta(hf_model: PreTrainedModel, optimizer: Any) -> Iterator[WholeMomentum]:
    """Those that this rank keeps beside its fragments; none but for Muon under ZeRO 1 and 2."""
    if not hasattr(optimizer, "params_in_partition"):
        return
    names = {id(parameter): name for name, parameter in hf_model.named_parameters()}
    for group, held in enumerate(optimizer.params_in_partition):
        if not held or not getattr(held[0], "use_muon", False):
            continue
        size, offset = sum(parameter.numel() for parameter in held), 0
        for parameter in held:
            mapping = parameter._hp_mapping
            first = mapping.lp_fragment_address.start == 0
            key = optimizer.single_partition_of_fp32_groups[group]
            yield WholeMomentum(names[id(parameter)], parameter.numel(), key, offset, size, first)
            offset += parameter.numel()


def refresh_parameters(optimizer: Any) -> None:
    """Make the parameters of the forward pass what the master weights say. A collective."""
    if hasattr(optimizer, "update_lp_params"):  # ZeRO 1 and 2
        optimizer.update_lp_params()
    elif hasattr(optimizer, "fp16_partitioned_groups_flat"):  # ZeRO 3
        for group in range(len(optimizer.fp16_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        optimizer.invalidate_secondary_tensor()  # hpZ's copies of what was before
        small = optimizer.persistent_parameters  # kept whole on every rank
        if small:
            small[0].partition(small)
            small[0].all_gather(small)
    elif hasattr(optimizer, "fp32_groups"):  # none, in half precision
        for lows, highs in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for low, high in zip(lows, highs, strict=True):
                low.data.copy_(high.data)


def replicated_masters(optimizer: Any) -> dict[int, torch.Tensor]:
    """Without ZeRO, in half precision: id of the parameter to its master weight. Else empty."""
    if not hasattr(optimizer, "fp32_groups"):
        return {}
    pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    return {id(low): high for lows, highs in pairs for low, high in zip(lows, highs, strict=True)}


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer that holds the states: DeepSpeed's wrap one."""
    return getattr(optimizer, "optimizer", optimizer)


def _of_sharded_parameter(name: str, parameter: Any, optimizer: Any) -> Iterator[Fragment]:
    """ZeRO 3: every parameter is cut into as many equal parts as there are ranks, the last ones padded."""
    group, offset, part = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = part * distributed.get_rank()
    length = min(part, parameter.ds_numel - start)
    if length > 0:
        key = optimizer.fp32_partitioned_groups_flat[group]
        yield Fragment(name, parameter.ds_numel, start, key, offset, length)


def _of_flat_groups(name: str, parameter: Any, optimizer: Any) -> Iterator[Fragment]:
    """ZeRO 1 and 2: all parameters of a group in one flat tensor, which is cut into equal parts."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return
    low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
    keys = getattr(optimizer, "single_partition_of_fp32_groups", None) or optimizer.fp32_groups_flat_partition
    key = keys[mapping.param_group_index]
    yield Fragment(name, parameter.numel(), low.start, key, high.start, high.numel)
