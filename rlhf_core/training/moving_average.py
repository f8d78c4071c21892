"""The moving average of a model (``train.enable_ema``), spread over its ranks.

::

    whole master weights, one tensor after another ─▶ the rank that keeps this tensor's average ─▶ folded in, in host memory
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from rlhf_core.algorithms.ema import start_ema, update_ema
from rlhf_core.errors import TrainingError
from rlhf_core.training.weights import master_weights

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
        """(Hugging Face name, the average in the parameter's type) of all ranks' shares, on every rank."""
        for index, (name, parameter) in enumerate(self._model.named_parameters()):
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            owner = index % self._rank.world_size
            whole = torch.empty(shape, dtype=parameter.dtype, device=self._rank.torch_device)
            if owner == self._rank.rank:
                whole.copy_(self._average[name])
            distributed.broadcast(whole, src=owner)
            yield name, whole

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
        for index, (name, weight) in enumerate(master_weights(self._model, self._optimizer)):
            if index % self._rank.world_size == self._rank.rank:
                yield name, weight
