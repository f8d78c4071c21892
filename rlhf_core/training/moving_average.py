"""The moving average of a model (``train.enable_ema``), spread over its ranks.

::

    whole master weights, one tensor after another ─▶ the rank that keeps this tensor's average ─▶ folded in, in host memory

Of what is trained: a frozen weight is its own average, and of an adapted matrix it is the adapter that is averaged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from rlhf_core.algorithms.ema import start_ema, update_ema
from rlhf_core.errors import TrainingError
from rlhf_core.training.lora import model_weights
from rlhf_core.training.quantized import whole_form
from rlhf_core.training.weights import gathered, master_weights

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import PreTrainedModel

    from rlhf_core.training.ranks import RankInfo


class MovingAverage:
    """One rank's share of the average. Making one, ``update`` and ``weights`` are collectives; a file is the rank's own."""

    def __init__(self, hf_model: PreTrainedModel, optimizer: Any, beta: float, rank: RankInfo) -> None:
        self._model, self._optimizer, self._beta, self._rank = hf_model, optimizer, beta, rank
        self._average = {name: start_ema({name: weight.cpu()})[name] for name, weight in self._mine()}

    def update(self) -> None:
        """Fold the weights in, after an optimizer step."""
        for name, weight in self._mine():
            update_ema({name: self._average[name]}, {name: weight.cpu()}, self._beta)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, the average in the parameter's type) of all ranks' shares, on every rank: as ``named_weights``,
        adapters merged."""
        trained = [(name, parameter) for name, parameter in self._model.named_parameters() if parameter.requires_grad]
        places = {id(parameter): (index, name) for index, (name, parameter) in enumerate(trained)}
        for weight in model_weights(self._model):
            frozen = [part for part in weight.parts if id(part) not in places]
            with gathered(frozen) as wholes:
                fixed = {id(part): whole for part, whole in zip(frozen, wholes, strict=True)}
                averages = [
                    self._whole(part, *places[id(part)]) if id(part) in places else fixed[id(part)]
                    for part in weight.parts
                ]
                yield weight.name, weight.whole(averages)

    def save(self, folder: Path) -> None:
        """Write this rank's share."""
        torch.save(self._average, folder / f"ema_rank{self._rank.rank}.pt")

    def load(self, folder: Path) -> None:
        """Go on from what ``save`` wrote, on whatever number of ranks.

        Raises:
            TrainingError: the checkpoint has no average, or one of another model.
        """
        files = sorted(folder.glob("ema_rank*.pt"))
        if not files:
            raise TrainingError(
                f"checkpoint {folder} has no moving average: it was written with train.enable_ema=false"
            )
        saved = {}
        for file in files:
            shares = torch.load(file, weights_only=True, mmap=True)  # read where it is copied only
            saved.update({name: shares[name].clone() for name in shares.keys() & self._average.keys()})
        shapes = ({name: average.shape for name, average in averages.items()} for averages in (saved, self._average))
        if next(shapes) != next(shapes):
            raise TrainingError(f"{folder} holds the moving average of another model")
        self._average = saved

    def _mine(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, (name, weight) in enumerate(master_weights(self._model, self._optimizer, trained_only=True)):
            if self._owner(index) == self._rank.rank:
                yield name, weight

    def _whole(self, parameter: torch.nn.Parameter, index: int, name: str) -> torch.Tensor:
        """The average of the ``index``-th parameter that is trained, from the rank that keeps it."""
        dtype, shape = whole_form(parameter)
        whole = torch.empty(shape, dtype=dtype, device=self._rank.torch_device)
        if self._owner(index) == self._rank.rank:
            whole.copy_(self._average[name])
        distributed.broadcast(whole, src=self._owner(index))
        return whole

    def _owner(self, index: int) -> int:
        return index % self._rank.world_size
