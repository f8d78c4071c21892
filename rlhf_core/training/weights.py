"""A model's weights as a whole, wherever DeepSpeed keeps their parts.

Everything here is a collective under ZeRO: call it on all ranks, and run an iterator to its end.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from rlhf_core.training.fragments import replicated_masters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel


def named_weights(hf_model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, whole tensor in the parameters' type), tied weights once.

    A tensor is valid until the next one is asked for.
    """
    import deepspeed

    for name, parameter in hf_model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            yield name, parameter.detach()


def master_weights(hf_model: PreTrainedModel, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, whole fp32 master weight); the parameter itself where it has none: in fp32, and where it is frozen.

    A tensor is valid until the next one is asked for.
    """
    import deepspeed

    replicated = replicated_masters(optimizer)
    for name, parameter in hf_model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            yield name, replicated[id(parameter)] if replicated else _sharded_master(parameter)
        else:
            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.detach()


def weight_digest(hf_model: PreTrainedModel, optimizer: Any) -> str:
    """sha256, hex, over name, type, shape and bytes of every master weight: the same on every rank."""
    sha256 = hashlib.sha256()
    first = distributed.get_rank() == 0
    for name, weight in master_weights(hf_model, optimizer):
        if first:  # the others only help to gather
            sha256.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
            sha256.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    digest = [sha256.hexdigest()]
    distributed.broadcast_object_list(digest, src=0)
    return digest[0]


def _sharded_master(parameter: torch.nn.Parameter) -> torch.Tensor:
    from deepspeed.utils import safe_get_full_fp32_param

    return safe_get_full_fp32_param(parameter)
