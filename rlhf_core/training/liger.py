"""Fused kernels for norms, rotary embeddings and gated layers (``ds.use_liger_kernel``): Hsu et al. 2024 (arXiv:2410.10989).

Only for what lies below the output layer: log-probs are computed here in tiles of their own, by ``model.LogprobHead``.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from rlhf_core.errors import TrainingError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_liger() -> None:
    """Return if this process can use Liger's kernels.

    Raises:
        TrainingError: it has no GPU, or liger-kernel is not installed.
    """
    if not torch.cuda.is_available():
        raise TrainingError("ds.use_liger_kernel needs a GPU, and this process has none: remove it")
    if find_spec("liger_kernel") is None:
        raise TrainingError("ds.use_liger_kernel needs liger-kernel: pip install 'rlhf-flow[liger]', or remove it")


def fuse_layers(model: PreTrainedModel) -> None:
    """Put Liger's kernels in place of the model's own.

    Raises:
        TrainingError: Liger has none for such a model.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:  # Liger itself would change nothing, and say so in a log
        raise TrainingError(f"ds.use_liger_kernel: liger-kernel has no kernels for models of type {kind!r}: remove it")
    _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)
