"""A model's training state in a local folder, and its model as a Hugging Face folder. Every rank takes part.

::

    folder/
      deepspeed/…       weights, masters and optimizer states (DeepSpeed's own files: for as many ranks, the same ZeRO stage
                        and division of layers)
      universal/…       or, with ds.use_universal_ckpt, the same by parameter: for any number of ranks and any stage
      rng_rank0.pt …    random states: python, numpy, torch
      ema_rank0.pt …    the moving average, where there is one
      trainer.json      version, optimizer steps, and what the state fits to (written last)

Of what is trained: frozen weights, such as those below adapters, are those of the model that training began with.
"""

from __future__ import annotations

import json
import random
import shutil
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import distributed
from transformers import AutoTokenizer
from transformers.utils import cached_file

from rlhf_core.errors import TrainingError
from rlhf_core.training.plain_checkpoints import load_plain
from rlhf_core.training.universal import load_universal, save_universal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from transformers import PreTrainedModel

    from rlhf_core.training.moving_average import MovingAverage
    from rlhf_core.training.ranks import RankInfo

STATE_FOLDER = "deepspeed"
UNIVERSAL_FOLDER = "universal"
TAG = "state"
TRAINER_FILE = "trainer.json"
# How a vision-language model reads images. Its chat template is the tokenizer's.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The numbers of a trainer, and what its state fits to."""

    version: int
    optimizer_steps: int
    world_size: int
    zero_stage: int
    param_dtype: str
    universal: bool = False  # other numbers of ranks and ZeRO stages may go on from it
    lora_rank: int = 0  # of adapters; 0: there are none
    tensor_parallel_size: int = 1


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """The tokenizer that goes with a model, and its image processor, if it has one."""

    path: str
    chat_template: str | None  # in place of its own

    def write(self, folder: Path) -> None:
        """Beside the model: whoever loads the folder renders as the run did."""
        tokenizer = AutoTokenizer.from_pretrained(self.path)
        if self.chat_template is not None:
            tokenizer.chat_template = self.chat_template
        tokenizer.save_pretrained(folder)
        for name in PROCESSOR_FILES:
            found = cached_file(self.path, name, _raise_exceptions_for_missing_entries=False)
            if found is not None:
                shutil.copyfile(found, folder / name)  # as it was: another version would write other settings


@dataclass(frozen=True, slots=True)
class Learner:
    """A model under DeepSpeed, as it is saved and restored."""

    engine: Any
    hf_model: PreTrainedModel
    average: MovingAverage | None
    rank: RankInfo


def save_state(learner: Learner, folder: Path, state: TrainerState) -> None:
    """Write the whole training state below ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    if state.universal:
        save_universal(learner.hf_model, learner.engine.optimizer, folder / UNIVERSAL_FOLDER, learner.rank)
    else:
        with _trained_only(learner.engine.module):
            learner.engine.save_checkpoint(str(folder / STATE_FOLDER), tag=TAG, exclude_frozen_parameters=True)
    torch.save(_rng_state(), folder / _rng_file(learner.rank))
    if learner.average is not None:
        learner.average.save(folder)
    distributed.barrier()
    if learner.rank.rank == 0:
        (folder / TRAINER_FILE).write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
    distributed.barrier()


def load_state(learner: Learner, folder: Path, expected: TrainerState) -> TrainerState:
    """Restore what ``save_state`` wrote.

    Raises:
        TrainingError: no such checkpoint, one of another type or of other adapters, or one that could run code; or, where it is
            not universal, of another number of ranks, ZeRO stage or division of layers.
    """
    state = _read_trainer_state(folder)
    _check_fits(state, expected, folder)
    if state.universal:
        load_universal(learner.hf_model, learner.engine.optimizer, folder / UNIVERSAL_FOLDER)
    elif not load_plain(learner.engine, folder / STATE_FOLDER, TAG):
        raise TrainingError(f"checkpoint {folder} has no readable {STATE_FOLDER}/{TAG}: use another checkpoint")
    if learner.average is not None:
        learner.average.load(folder)
    random_states = folder / _rng_file(learner.rank)
    if random_states.is_file():  # a rank that there was not keeps those it began with
        _restore_rng(torch.load(random_states, weights_only=True))
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


@contextmanager
def _trained_only(module: torch.nn.Module) -> Iterator[None]:
    """Within, its state is without frozen parameters, by whichever name: DeepSpeed leaves a tied one under its second."""

    def forget(module: torch.nn.Module, state: dict[str, torch.Tensor], prefix: str, _metadata: object) -> None:
        for name, parameter in module.named_parameters(prefix.rstrip("."), remove_duplicate=False):
            if not parameter.requires_grad:
                state.pop(name, None)

    hook = module.register_state_dict_post_hook(forget)
    try:
        yield
    finally:
        hook.remove()


def _check_fits(state: TrainerState, expected: TrainerState, folder: Path) -> None:
    remedies = {"param_dtype": "restore ds.param_dtype", "lora_rank": "restore ds.lora.rank"}
    if not state.universal:
        universal = "only checkpoints written with ds.use_universal_ckpt=true fit another one"
        remedies["world_size"] = f"restore the ranks of this model (num_nodes × num_gpus_per_node); {universal}"
        remedies["zero_stage"] = f"restore ds.zero_stage; {universal}"
        remedies["tensor_parallel_size"] = f"restore ds.tensor_parallel_size; {universal}"
    for name, remedy in remedies.items():
        was, now = getattr(state, name), getattr(expected, name)
        if was != now:
            raise TrainingError(f"checkpoint {folder} was written with {name}={was}, this run has {now}: {remedy}")


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
