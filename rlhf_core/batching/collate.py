"""Rows of different lengths as right-padded tensors.

The alignment that every per-token array keeps: **index t belongs to token t**. Its log-prob is that of token t given
the tokens before it, so the logits at position t - 1 predict it, and nothing predicts token 0::

    row            token_ids [11, 12, 40, 2]   action_ranges [(2, 4)]
    input_ids      11  12  40   2   0          padded to the longest row of the micro-batch
    action_mask     .   .   x   x   .

No attention mask: under causal attention no token sees the padding to its right, so it would change nothing, and
without one the fast causal kernels run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from rlhf_core.errors import TrainingError
from rlhf_core.records.trajectory import action_mask

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from rlhf_core.records.experience import Experience
    from rlhf_core.records.trajectory import ActionRange, ImageRef


class TokenRow(Protocol):
    """What a forward pass needs of a row: ``T`` tokens and where the policy spoke."""

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """[T]."""
        ...

    @property
    def action_ranges(self) -> tuple[ActionRange, ...]:
        """Where the policy spoke."""
        ...

    @property
    def temperature(self) -> float:
        """What the logits are divided by."""
        ...


class ImageRow(TokenRow, Protocol):
    """A row that may show images."""

    @property
    def images(self) -> tuple[ImageRef, ...]:
        """In the order of their tokens."""
        ...


class PairRow(Protocol):
    """Two answers to one prompt."""

    @property
    def chosen(self) -> TokenRow:
        """The better one, with its prompt."""
        ...

    @property
    def rejected(self) -> TokenRow:
        """The worse one, with its prompt."""
        ...


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """What a vision-language model takes besides the tokens of a micro-batch."""

    tensors: Mapping[str, torch.Tensor]  # pixel values and the like, as the model's forward names them
    blank_T: torch.Tensor | None = None  # int64, ids of a blank image: a row after the others that nobody asks about

    def to(self, device: torch.device) -> ImageInputs:
        """The same on ``device``."""
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return ImageInputs(tensors, None if self.blank_T is None else self.blank_T.to(device))

    def add_blank_row(self, input_ids_BT: torch.Tensor) -> torch.Tensor:
        """The ids that the model gets: ``[B, T]``, or ``[B + 1, max(T, blank)]``."""
        if self.blank_T is None:
            return input_ids_BT
        B, T = input_ids_BT.shape
        padded = input_ids_BT.new_zeros((B + 1, max(T, len(self.blank_T))))
        padded[:B, :T] = input_ids_BT
        padded[B, : len(self.blank_T)] = self.blank_T
        return padded


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """One micro-batch of a forward pass."""

    input_ids_BT: torch.Tensor  # int64, 0 where padded
    action_mask_BT: torch.Tensor  # bool, True where the policy spoke
    temperature_B: torch.Tensor  # float32
    images: ImageInputs | None = None  # None: the model gets tokens only

    def to(self, device: torch.device) -> TokenBatch:
        """The batch on ``device``."""
        return TokenBatch(
            self.input_ids_BT.to(device),
            self.action_mask_BT.to(device),
            self.temperature_B.to(device),
            None if self.images is None else self.images.to(device),
        )

    def with_images(self, images: ImageInputs) -> TokenBatch:
        """The same rows with what they show."""
        return replace(self, images=images)


@dataclass(frozen=True, slots=True)
class ExperienceBatch:
    """One micro-batch of an update. Arrays are float32 and 0 outside actions."""

    tokens: TokenBatch
    old_logprobs_BT: torch.Tensor | None  # None: those of the update's own forward pass
    rollout_logprobs_BT: torch.Tensor
    ref_logprobs_BT: torch.Tensor | None  # None without a reference model
    advantages_BT: torch.Tensor
    values_BT: torch.Tensor | None  # None without a critic
    returns_BT: torch.Tensor
    constrained_B: torch.Tensor  # bool, True: rollout log-probs are not the policy's own

    def to(self, device: torch.device) -> ExperienceBatch:
        """The batch on ``device``."""
        old, ref, values = self.old_logprobs_BT, self.ref_logprobs_BT, self.values_BT
        return ExperienceBatch(
            self.tokens.to(device),
            None if old is None else old.to(device),
            self.rollout_logprobs_BT.to(device),
            None if ref is None else ref.to(device),
            self.advantages_BT.to(device),
            None if values is None else values.to(device),
            self.returns_BT.to(device),
            self.constrained_B.to(device),
        )

    def with_images(self, images: ImageInputs) -> ExperienceBatch:
        """The same rows with what they show."""
        return replace(self, tokens=self.tokens.with_images(images))


def collate_tokens(rows: Sequence[TokenRow]) -> TokenBatch:
    """Rows as one padded batch.

    Raises:
        TrainingError: an action at index 0, which no token precedes, or outside the row.
    """
    for row in rows:
        _check_ranges(row)
    width = max(len(row.token_ids) for row in rows)
    return TokenBatch(
        input_ids_BT=_pad([row.token_ids for row in rows], width, np.int64),
        action_mask_BT=_pad([action_mask(row.action_ranges, len(row.token_ids)) for row in rows], width, np.bool_),
        temperature_B=torch.tensor([row.temperature for row in rows], dtype=torch.float32),
    )


def collate_pairs(pairs: Sequence[PairRow]) -> TokenBatch:
    """B pairs as one padded batch of 2B rows: the chosen ones, then the rejected ones in the same order.

    Raises:
        TrainingError: as ``collate_tokens``.
    """
    return collate_tokens([*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)])


def collate_experiences(rows: Sequence[Experience]) -> ExperienceBatch:
    """Experiences as one padded batch.

    Raises:
        TrainingError: as ``collate_tokens``; or log-probs or values on some rows only.
    """
    tokens = collate_tokens(rows)
    width = tokens.input_ids_BT.shape[1]
    olds = [row.old_logprobs for row in rows if row.old_logprobs is not None]
    refs = [row.ref_logprobs for row in rows if row.ref_logprobs is not None]
    values = [row.values for row in rows if row.values is not None]
    for name, found in (("old log-probs", olds), ("reference log-probs", refs), ("values", values)):
        if len(found) not in (0, len(rows)):
            raise TrainingError(f"{name} on {len(found)} of {len(rows)} rows: score all rows of an iteration, or none")
    return ExperienceBatch(
        tokens=tokens,
        old_logprobs_BT=_pad(olds, width, np.float32) if olds else None,
        rollout_logprobs_BT=_pad([row.rollout_logprobs for row in rows], width, np.float32),
        ref_logprobs_BT=_pad(refs, width, np.float32) if refs else None,
        advantages_BT=_pad([row.advantages for row in rows], width, np.float32),
        values_BT=_pad(values, width, np.float32) if values else None,
        returns_BT=_pad([row.returns for row in rows], width, np.float32),
        constrained_B=torch.tensor([row.constrained for row in rows], dtype=torch.bool),
    )


def _check_ranges(row: TokenRow) -> None:
    for start, end in row.action_ranges:
        if start < 1 or end > len(row.token_ids):
            raise TrainingError(
                f"action range [{start}, {end}) of a row of {len(row.token_ids)} tokens: "
                "actions start at index 1 (no token precedes index 0) and end inside the row"
            )


def _pad(arrays: Sequence[NDArray[np.generic]], width: int, dtype: type[np.generic]) -> torch.Tensor:
    """Arrays ``[T]`` as one ``[B, width]``, 0 to the right."""
    padded_BT = np.zeros((len(arrays), width), dtype=dtype)
    for row, array in zip(padded_BT, arrays, strict=True):
        row[: len(array)] = array
    return torch.from_numpy(padded_BT)
