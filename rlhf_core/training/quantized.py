"""A frozen model in 4 bits under its adapters (``ds.load_in_4bit``): QLoRA, Dettmers et al. 2023 (arXiv:2305.14314).

::

    from_pretrained ─▶ linear layers as NF4, two numbers a byte ─▶ each forward pass unpacks one layer after the other
                                       │
                                       └─ unpacked ─▶ bf16 [out, in], to which an adapter is added for engines and exports
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from rlhf_core.errors import TrainingError
from rlhf_core.training.tensor_parallel import cut_of

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def check_quantization() -> None:
    """Return if this process can hold a model in 4 bits.

    Raises:
        TrainingError: it has no GPU, or bitsandbytes is not installed.
    """
    if not torch.cuda.is_available():
        raise TrainingError("ds.load_in_4bit needs a CUDA GPU, and this process has none: remove it")
    if find_spec("bitsandbytes") is None:
        raise TrainingError("ds.load_in_4bit needs bitsandbytes: pip install 'rlhf-flow[qlora]', or remove it")


def loading_in_4bit() -> dict[str, Any]:
    """Arguments of ``from_pretrained``. Embeddings, norms, the output layer and a head keep their type."""
    from transformers import BitsAndBytesConfig

    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    }


def export_unpacked(model: PreTrainedModel) -> None:
    """Let what is saved of a model be a plain one: its weights are unpacked by then."""
    del model.config.quantization_config
    model.hf_quantizer = None


def whole_form(parameter: nn.Parameter) -> tuple[torch.dtype, tuple[int, ...]]:
    """Type and shape of a parameter unpacked and gathered.

    ZeRO-3 and tensor parallelism leave only a part in it, and 4 bits are bytes.
    """
    packed = getattr(parameter, "quant_state", None)  # of bitsandbytes
    if packed is not None:
        return packed.dtype, tuple(packed.shape)
    if (cut := cut_of(parameter)) is not None:
        return parameter.dtype, cut.shape
    return parameter.dtype, tuple(getattr(parameter, "ds_shape", parameter.shape))


def unpacked(parameter: nn.Parameter, data: torch.Tensor) -> torch.Tensor:
    """A parameter's data; if they are in 4 bits, a new tensor in the type they are computed with."""
    packed = getattr(parameter, "quant_state", None)
    if packed is None:
        return data
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(data, packed)
