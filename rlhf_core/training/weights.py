"""A model's weights as a whole, wherever DeepSpeed keeps their parts: what engines, digests, exports and averages see.

Everything here is a collective under ZeRO and tensor parallelism: call it on all ranks, and run an iterator to its end.
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from rlhf_core.training.fragments import replicated_masters
from rlhf_core.training.lora import model_weights
from rlhf_core.training.tensor_parallel import whole_of
from rlhf_core.weights import TensorMeta

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedModel


@contextmanager
def gathered(parameters: Sequence[torch.nn.Parameter]) -> Iterator[list[torch.Tensor]]:
    """Within, the parameters' whole data, detached."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters):
        yield [whole_of(parameter, parameter.detach()) for parameter in parameters]


def named_weights(hf_model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, whole tensor in the parameters' type), tied weights once, adapters merged into theirs.

    A tensor is valid until the next one is asked for.
    """
    for weight in model_weights(hf_model):
        with gathered(weight.parts) as parts:
            yield weight.name, weight.whole(parts)


def weight_metadata(hf_model: PreTrainedModel) -> list[TensorMeta]:
    """What ``named_weights`` yields, without moving anything."""
    return [TensorMeta(weight.name, weight.dtype, weight.shape) for weight in model_weights(hf_model)]


def master_weights(
    hf_model: PreTrainedModel, optimizer: Any, trained_only: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole fp32 master weight); the parameter itself where it has none: in fp32, and where it is frozen.

    Adapters are parameters of their own here, by PEFT's names. A tensor is valid until the next one is asked for.
    """
    replicated = replicated_masters(optimizer)
    for name, parameter in hf_model.named_parameters():
        if trained_only and not parameter.requires_grad:
            continue
        if parameter.requires_grad and parameter.dtype != torch.float32:
            master = replicated[id(parameter)].detach() if replicated else _sharded_master(parameter)
            yield name, whole_of(parameter, master)
        else:
            with gathered([parameter]) as [whole]:
                yield name, whole


def weight_digest(hf_model: PreTrainedModel, optimizer: Any) -> str:
    """sha256, hex, over name, type, shape and bytes of every master weight, adapters by themselves: the same on every rank."""
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
