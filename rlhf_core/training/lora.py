"""Low-rank adapters: what is trained in place of a model's matrices (``ds.lora``), and the weights that they amount to.

::

    q_proj.weight W [out, in]              q_proj.base_layer.weight   W [out, in]   frozen
                               ─ add ─▶    q_proj.lora_A.default.weight A [r, in]   trained, random at first
                                           q_proj.lora_B.default.weight B [out, r]  trained, 0 at first
                                                        │
    q_proj.weight  W + alpha / r · B A   ◀─ model_weights ─┘   computed in fp32 whenever it is asked for

Hu et al. 2021 (arXiv:2106.09685), by PEFT's layers. W is never changed, so nothing adds up that rounding took away. Engines,
exports and the moving average see the weights by the names of the plain model; the digest and the checkpoints of the training
state see W, A and B.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn

from rlhf_core.errors import TrainingError
from rlhf_core.telemetry import get_logger
from rlhf_core.training.quantized import unpacked, whole_form

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

    from rlhf_core.config.trained import LoraConfig
    from rlhf_core.training.ranks import RankInfo

logger = get_logger(__name__)

ALL_LINEAR = "all-linear"
ADAPTER = "default"  # PEFT's name for the only one
BASE = ".base_layer."  # in the names of what an adapted layer was before
WHOLE_MODEL = "base_model.model."  # PEFT's prefix of names in its files


@dataclass(frozen=True, slots=True)
class Adapter:
    """What is added to one matrix: ``scale · B A``."""

    a: nn.Parameter  # [r, in]
    b: nn.Parameter  # [out, r]
    scale: float


@dataclass(frozen=True, slots=True)
class ModelWeight:
    """A weight of the plain model, and what it is made of."""

    name: str  # Hugging Face's
    parameter: nn.Parameter
    adapter: Adapter | None = None

    @property
    def parts(self) -> list[nn.Parameter]:
        """The parameter; of an adapted matrix with A and B."""
        return [self.parameter] if self.adapter is None else [self.parameter, self.adapter.a, self.adapter.b]

    @property
    def dtype(self) -> torch.dtype:
        """Of the whole."""
        return whole_form(self.parameter)[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole; ZeRO-3 leaves only a shard in the parameter."""
        return whole_form(self.parameter)[1]

    def whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The weight from whole tensors for ``parts``: the first itself, or a new tensor."""
        weight, *factors = parts
        weight = unpacked(self.parameter, weight)
        if self.adapter is None:
            return weight
        a_RI, b_OR = factors
        merged = torch.addmm(weight.float(), b_OR.float(), a_RI.float(), alpha=self.adapter.scale)
        return merged.to(weight.dtype)


def add_adapters(
    hf_model: PreTrainedModel, settings: LoraConfig, seed: int, trained_too: Iterable[nn.Parameter] = ()
) -> None:
    """Freeze the model, and give its linear layers adapters, the same on every rank. Nothing with ``settings.rank=0``.

    Only layers of the language model get any: neither the output layer, whose logits never exist as a whole, nor a vision
    tower.

    Args:
        hf_model: in host memory, before DeepSpeed sees it. It says at first what it said before.
        settings: ``ds.lora``.
        seed: of the A.
        trained_too: parameters that stay trainable, whole: a head that has learned nothing yet.

    Raises:
        TrainingError: a name of ``target_modules`` is of no such layer.
    """
    if settings.rank == 0:
        return
    from peft import LoraConfig as PeftConfig  # three seconds, which runs without adapters need not pay
    from peft import inject_adapter_in_model

    targets = adapted_modules(hf_model, settings.target_modules)
    peft_config = PeftConfig(
        r=settings.rank, lora_alpha=settings.alpha, lora_dropout=settings.dropout, target_modules=targets
    )
    inject_adapter_in_model(peft_config, hf_model, ADAPTER)
    for parameter in trained_too:
        parameter.requires_grad_(True)
    _reset(hf_model, seed)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in hf_model.parameters()]
    trained, total = sum(size for size, learns in sizes if learns), sum(size for size, _ in sizes)
    logger.info("adapters on %d layers: %d of %d parameters are trained", len(targets), trained, total)


def adapted_modules(hf_model: PreTrainedModel, wanted: Sequence[str]) -> list[str]:
    """Full names of the layers that get adapters, in the model's order.

    Args:
        hf_model: without adapters.
        wanted: ends of names (``q_proj``, ``mlp.up_proj``), or ``all-linear``.

    Raises:
        TrainingError: one of them is of no layer that can have any.
    """
    inside = {id(module) for module in hf_model.get_decoder().modules()} - {id(hf_model.get_output_embeddings())}
    linear = [
        name for name, module in hf_model.named_modules() if isinstance(module, nn.Linear) and id(module) in inside
    ]
    found: set[str] = set()
    for target in wanted:
        matches = [name for name in linear if target == ALL_LINEAR or f".{name}".endswith(f".{target}")]
        if not matches:
            kinds = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "it has none"
            raise TrainingError(
                f"ds.lora.target_modules: {target!r} is no linear layer in the language model of {type(hf_model).__name__} "
                f"(the output layer and a vision tower have no adapters): use {ALL_LINEAR!r}, or of {kinds}"
            )
        found.update(matches)
    return [name for name in linear if name in found]


def model_weights(hf_model: PreTrainedModel) -> Iterator[ModelWeight]:
    """The weights of the plain model, tied ones once, in its order, with adapters or without any."""
    adapters = _adapters(hf_model)
    factors = {id(factor) for adapter in adapters.values() for factor in (adapter.a, adapter.b)}
    for name, parameter in hf_model.named_parameters():
        if id(parameter) not in factors:
            plain = name.replace(BASE, ".") if adapters else name
            yield ModelWeight(plain, parameter, adapters.get(id(parameter)))


def export_adapter(hf_model: PreTrainedModel, source: str, folder: Path, rank: RankInfo) -> None:
    """Write all that is trained as a folder of PEFT's, for who has the plain model already. A collective.

    Args:
        hf_model: with adapters.
        source: folder or id of the plain model.
        folder: to make.
        rank: who this process is.
    """
    import deepspeed

    heads, tensors = set(), {}
    for name, parameter in hf_model.named_parameters():
        if parameter.requires_grad:
            with deepspeed.zero.GatheredParameters([parameter]):
                if rank.rank == 0:
                    tensors[WHOLE_MODEL + name.replace(f".{ADAPTER}.", ".")] = parameter.detach().cpu().clone()
            if ".lora_" not in name:
                heads.add(name.rpartition(".")[0])
    if rank.rank == 0:
        written = copy(hf_model.peft_config[ADAPTER])
        written.base_model_name_or_path, written.inference_mode = source, True
        written.task_type = "SEQ_CLS" if heads else "CAUSAL_LM"
        written.modules_to_save = sorted(heads) or None
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        written.save_pretrained(folder)


def _adapters(hf_model: PreTrainedModel) -> dict[int, Adapter]:
    """Id of an adapted matrix to what is added to it."""
    if not hasattr(hf_model, "peft_config"):  # PEFT's mark
        return {}
    return {
        id(layer.base_layer.weight): Adapter(
            layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight, layer.scaling[ADAPTER]
        )
        for layer in _layers(hf_model)
    }


def _layers(hf_model: PreTrainedModel) -> Iterator[Any]:
    """Those with an adapter, in the model's order."""
    return (module for module in hf_model.modules() if hasattr(module, "lora_A"))


def _reset(hf_model: PreTrainedModel, seed: int) -> None:
    """A as PEFT and a linear layer begin, but from a seed of its own; B = 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in _layers(hf_model):
            a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            random_RI = torch.empty(a.shape)
            nn.init.kaiming_uniform_(random_RI, a=math.sqrt(5), generator=generator)
            a.copy_(random_RI)
            b.zero_()
