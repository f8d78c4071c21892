"""DeepSpeed's checkpoint files are pickles, and DeepSpeed would run what stands in them. Here they are read as plain values.

Whoever may write to the store of a run could else run code in its ranks.
"""

from __future__ import annotations

import pickle
import re
from typing import TYPE_CHECKING, Any

import torch

from rlhf_core.errors import TrainingError

if TYPE_CHECKING:
    from pathlib import Path


def load_plain(engine: Any, folder: Path, tag: str) -> bool:
    """Restore a DeepSpeed engine from what it saved in ``folder``. False if there is nothing there.

    Raises:
        TrainingError: a file holds more than tensors, plain values and DeepSpeed's own records; or it is of another model.
    """
    engine.checkpoint_engine.load = _load  # which DeepSpeed calls for every file
    try:
        loaded, _ = engine.load_checkpoint(str(folder), tag=tag, custom_load_fn=_load_trained)
    except pickle.UnpicklingError as error:
        raise TrainingError(
            f"checkpoint {folder} holds objects that could run code when they are read ({_refused(error)}), and was not "
            "written so by this system: use another checkpoint, and find out who wrote this one"
        ) from error
    return loaded is not None


def _load(path: str, map_location: Any = None) -> Any:
    with torch.serialization.safe_globals(_records()):
        return torch.load(path, map_location=map_location, weights_only=True)


def _load_trained(src: dict[str, torch.Tensor], dst: torch.nn.Module) -> None:
    """As DeepSpeed's own strict loading, but that frozen weights are not saved: they stay those of the starting point."""
    parameters = dst.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in parameters if not parameter.requires_grad}
    packing = tuple(f"{name}." for name in frozen)  # scales and the like of weights in 4 bits, which are saved too
    trained = {name: value for name, value in src.items() if not name.startswith(packing)}
    missing, unexpected = dst.load_state_dict(trained, strict=False)
    if odd := sorted({*missing, *unexpected} - frozen):
        raise TrainingError(
            f"the checkpoint is of another model, or of other adapters: {', '.join(odd[:5])}{' ...' if len(odd) > 5 else ''}"
        )


def _records() -> list[Any]:
    """Classes of DeepSpeed's whose instances stand in its files; they hold numbers."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]


def _refused(error: Exception) -> str:
    """What torch refused; around it torch gives advice on reading the file all the same."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    return named[1] if named else str(error).splitlines()[0]
