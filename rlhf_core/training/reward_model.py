"""A trained reward model in one process: rows of token ids to one score each.

    rows ─▶ longest first, micro-batches padded to the right ─▶ SequenceScorer ─▶ scores in the order of the rows

No token sees the padding to its right, so a row's score is its own, whatever it is batched with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification

from rlhf_core.errors import TrainingError
from rlhf_core.training.loading import load_model_config, load_weights, refuse_missing
from rlhf_core.training.offload import HostOffload, module_tensors
from rlhf_core.training.packing import refuse_leaks
from rlhf_core.training.value_model import SequenceScorer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.training.loading import LoadSettings

REWARD_MODEL = "reward model"


class RewardModel:
    """The whole model, on one device, in eval mode. It is never trained here.

    Args:
        settings: type of the weights, attention, whether code of the model may run. Only with fp32 does a row have the same
            score alone and beside others.
        path: a folder or hub id of a sequence classifier with one output.
        device: where it computes.
        micro_batch_size: rows of a forward pass.
        max_len: longest row, tokens; default: what the model was made for.

    Raises:
        TrainingError: there is no such model, it lacks its head, or it is another kind of classifier.
    """

    def __init__(
        self,
        settings: LoadSettings,
        path: str,
        *,
        device: torch.device | str = "cpu",
        micro_batch_size: int = 8,
        max_len: int | None = None,
    ) -> None:
        model_config = load_model_config(settings, path, REWARD_MODEL, num_labels=1)
        model, missing = load_weights(AutoModelForSequenceClassification, settings, path, REWARD_MODEL, model_config)
        refuse_missing(missing, path, REWARD_MODEL)  # a new head would score at random
        self._device = torch.device(device)
        self._micro_batch_size = micro_batch_size
        self._scorer = SequenceScorer(model, settings.ds.packing_samples).requires_grad_(False).to(self._device).eval()
        refuse_leaks(self._scorer, self._scorer, self._device)
        self._offload = HostOffload(lambda: module_tensors(self._scorer), self._device)
        own = getattr(model_config.get_text_config(), "max_position_embeddings", None)
        limits = [limit for limit in (max_len, own) if limit is not None]
        if not limits:
            raise TrainingError(
                f"{path!r} does not say how long its texts may be: set reward.model_max_len (--max-len)"
            )
        self.max_len: int = min(limits)  # tokens

    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """One score a row, in their order. A row has a token at least, and at most ``max_len``."""
        self._offload.check_here()
        scores = [0.0] * len(rows)
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]), reverse=True)
        for start in range(0, len(order), self._micro_batch_size):
            chunk = order[start : start + self._micro_batch_size]
            for index, score in zip(chunk, self._forward([rows[index] for index in chunk]), strict=True):
                scores[index] = score
        return scores

    def offload(self) -> None:
        """Leave the device to others: the weights move to host memory."""
        self._offload.offload()

    def reload(self) -> None:
        """Move the weights back."""
        self._offload.reload()

    def _forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Of one micro-batch."""
        lengths_B = torch.tensor([len(row) for row in rows])
        ids_BT = np.zeros((len(rows), int(lengths_B.max())), np.int64)
        for padded, row in zip(ids_BT, rows, strict=True):
            padded[: len(row)] = row
        with torch.no_grad():
            scores_B = self._scorer(torch.from_numpy(ids_BT).to(self._device), lengths_B.to(self._device))
        return [float(score) for score in scores_B.tolist()]
