"""A model's training state in a local folder, and its model as a Hugging Face folder. Every rank takes part.

::

    folder/
      deepspeed/…       weights, masters and optimizer states (DeepSpeed's own files)
      rng_rank0.pt …    random states: python, numpy, torch
      ema_rank0.pt …    the moving average, where there is one
      trainer.json      version, optimizer steps, and what the state fits to (written last)
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import distributed
from transformers import AutoTokenizer

from rlhf_core.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from transformers import PreTrainedModel

    from rlhf_core.training.moving_average import MovingAverage
    from rlhf_core.training.ranks import RankInfo

STATE_FOLDER = "deepspeed"
TAG = "state"
TRAINER_FILE = "trainer.json"


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The numbers of a trainer, and what its state fits to."""

    version: int
    optimizer_steps: int
    world_size: int
    zero_stage: int
    param_dtype: str


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """The tokenizer that goes with a model."""

    path: str
    chat_template: str | None  # in place of its own

    def write(self, folder: Path) -> None:
        """Beside the model: whoever loads the folder renders as the run did."""
        tokenizer = AutoTokenizer.from_pretrained(self.path)
        if self.chat_template is not None:
            tokenizer.chat_template = self.chat_template
        tokenizer.save_pretrained(folder)


def save_state(engine: Any, folder: Path, state: TrainerState, rank: RankInfo, average: MovingAverage | None) -> None:
    """Write the whole training state below ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    engine.save_checkpoint(str(folder / STATE_FOLDER), tag=TAG)
    torch.save(_rng_state(), folder / _rng_file(rank))
    if average is not None:
        average.save(folder)
    distributed.barrier()
    if rank.rank == 0:
        (folder / TRAINER_FILE).write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
    distributed.barrier()


def load_state(
    engine: Any, folder: Path, expected: TrainerState, rank: RankInfo, average: MovingAverage | None
) -> TrainerState:
    """Restore what ``save_state`` wrote.

    Raises:
        TrainingError: no such checkpoint, or one of another number of ranks, ZeRO stage or type.
    """
    state = _read_trainer_state(folder)
    for name, key in (
        ("world_size", "the ranks of this model (num_nodes × num_gpus_per_node)"),
        ("zero_stage", "ds.zero_stage"),
        ("param_dtype", "ds.param_dtype"),
    ):
        was, now = getattr(state, name), getattr(expected, name)
        if was != now:
            raise TrainingError(f"checkpoint {folder} was written with {name}={was}, this run has {now}: restore {key}")
    loaded, _ = engine.load_checkpoint(str(folder / STATE_FOLDER), tag=TAG)
    if loaded is None:
        raise TrainingError(f"checkpoint {folder} has no readable {STATE_FOLDER}/{TAG}: use another checkpoint")
    if average is not None:
        average.load(folder)
    _restore_rng(torch.load(folder / _rng_file(rank), weights_only=True))
    return state


def export_hf(
    hf_model: PreTrainedModel,
    named_weights: Iterable[tuple[str, torch.Tensor]],
    tokenizer: TokenizerSource,
    folder: Path,
    rank: RankInfo,
) -> None:
    """Write model (safetensors), configuration and tokenizer as a Hugging Face folder."""
    weights = {}
    for name, weight in named_weights:
        if rank.rank == 0:
            weights[name] = weight.cpu().clone()
    if rank.rank == 0:
        hf_model.save_pretrained(folder, state_dict=weights)
        tokenizer.write(folder)
    distributed.barrier()


def _read_trainer_state(folder: Path) -> TrainerState:
    file = folder / TRAINER_FILE
    if not file.is_file():
        raise TrainingError(f"no complete checkpoint at {folder}: {TRAINER_FILE} is missing")
    try:
        return TrainerState(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise TrainingError(f"{file} is damaged ({error}): use another checkpoint") from error


def _rng_file(rank: RankInfo) -> str:
    return f"rng_rank{rank.rank}.pt"


def _rng_state() -> dict[str, Any]:
    """Only plain values and tensors, so that reading it back runs no code."""
    python_version, python_words, python_gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    state: dict[str, Any] = {
        "python": (python_version, list(python_words), python_gauss),
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": numpy_state["state"]["key"].tolist()}},
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_rng(state: dict[str, Any]) -> None:
    python_version, python_words, python_gauss = state["python"]
    random.setstate((python_version, tuple(python_words), python_gauss))
    numpy_state = state["numpy"]
    numpy_state["state"]["key"] = np.array(numpy_state["state"]["key"], dtype=np.uint32)
    np.random.set_state(numpy_state)
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
