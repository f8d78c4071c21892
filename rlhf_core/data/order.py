"""The order of prompts, and the seed of each sample: pure functions of the run's seed.

    epoch 0                       epoch 1
    ├─ 2 ─┼─ 2 ─┼─ 2 ─┼ 1 ┤       ├─ 2 ─┼ ...         7 prompts, batch 2: the last batch of an epoch is short,
    cursor (0,0) (0,2) (0,4) (0,6) (1,0) (1,2)        none crosses into the next

A cursor is the whole state: a run that resumes from it draws what an uninterrupted run would have drawn.

With weights (``data.prompt_probs``, ``data.probs``) an epoch is the largest mix in these proportions in which no row
comes twice: of N rows, dataset d gives N·p_d (largest remainders make them whole), where N = min over d of size_d / p_d,
rounded down. The rows that one epoch leaves over open the next: each dataset is walked round and round in a seeded permutation.

    sizes 6 and 3, weights .5 and .5: N = 6, three of each      epoch 0: a0 a1 a2 b0 b1 b2 (shuffled)
                                                                epoch 1: a3 a4 a5 b0 b1 b2 (shuffled)
"""

from __future__ import annotations

import hashlib
import json
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.errors import DataError
from rlhf_core.records import PromptCursor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class PromptOrder:
    """The seeded order of the rows of one or several datasets, laid end to end."""

    def __init__(self, sizes: Sequence[int], seed: int, probs: Sequence[float] | None = None) -> None:
        """Make the order.

        Args:
            sizes: Rows of each dataset, [D].
            seed: ``train.seed``.
            probs: Mixing weights, [D]; none: every row of every dataset in each epoch.

        Raises:
            DataError: There is no row, or a weight so small that its dataset would never be drawn.
        """
        self._seed = seed
        self._starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self._sizes = list(sizes)
        self._quotas = list(sizes) if probs is None else _quotas(sizes, probs)
        self._drawn = np.empty(0, dtype=np.int64)  # of the epoch last asked for
        self._drawn_epoch = -1
        if self.size == 0:
            raise DataError("nothing to draw: every dataset is empty; fill one, or name another")

    @property
    def size(self) -> int:
        """Rows of one epoch."""
        return sum(self._quotas)

    def epoch(self, epoch: int) -> NDArray[np.int64]:
        """Row indices of one epoch in their order, each at most once, [size]."""
        if self._drawn_epoch != epoch:
            rows = np.concatenate([self._rows_of(index, epoch) for index in range(len(self._sizes))])
            self._drawn, self._drawn_epoch = rows[_permutation(rows.size, "epoch", self._seed, epoch)], epoch
        return self._drawn

    def draw(self, cursor: PromptCursor, count: int) -> tuple[list[int], PromptCursor]:
        """The next ``count`` row indices, fewer at the end of an epoch, and the cursor behind them.

        Raises:
            DataError: The cursor lies beyond the epoch: the data is not that of the run it came from.
        """
        if count < 1:
            raise ValueError(f"cannot draw {count} prompts")
        if not 0 <= cursor.offset <= self.size:
            raise DataError(
                f"position {cursor.offset} of epoch {cursor.epoch} does not exist in {self.size} prompts: they are "
                "not those the run began with; restore them, or begin a new run"
            )
        if cursor.offset == self.size:
            cursor = PromptCursor(cursor.epoch + 1)
        end = min(cursor.offset + count, self.size)
        indices = [int(index) for index in self.epoch(cursor.epoch)[cursor.offset : end]]
        return indices, PromptCursor(cursor.epoch + 1) if end == self.size else PromptCursor(cursor.epoch, end)

    def _rows_of(self, index: int, epoch: int) -> NDArray[np.int64]:
        """The rows dataset ``index`` gives to ``epoch``: a window of its cyclic permutation, so none comes twice."""
        size, quota = self._sizes[index], self._quotas[index]
        if quota == 0:
            return np.empty(0, dtype=np.int64)
        window = (epoch * quota + np.arange(quota)) % size
        rows: NDArray[np.int64] = self._starts[index] + _permutation(size, "dataset", self._seed, index)[window]
        return rows


def iterations(size: int, batch: int, episodes: int) -> int:
    """Iterations of a run: ``episodes`` passes through ``size`` prompts, the last batch of each pass may be short."""
    return episodes * -(-size // batch)


def sample_seed(run_seed: int, iteration: int, prompt_row_id: str, sample_index: int) -> int:
    """The sampling seed of one sample, in [0, 2³¹): the same everywhere, another for each iteration and sample."""
    return _digest("sample", run_seed, iteration, prompt_row_id, sample_index) % 2**31


def _permutation(size: int, *key: Any) -> NDArray[np.int64]:
    # RandomState: the one generator of numpy whose stream is frozen (NEP 19), so that an upgrade cannot reorder a run
    order: NDArray[np.int64] = np.random.RandomState(_digest(*key) % 2**32).permutation(size).astype(np.int64)
    return order


def _digest(*key: Any) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps(key).encode()).digest()[:8], "big")


def _quotas(sizes: Sequence[int], probs: Sequence[float]) -> list[int]:
    """Rows of each dataset in one epoch of a weighted mix, [D]."""
    weights = [Fraction(str(prob)) for prob in probs]  # exact: 0.1 is 1/10, so no rounding decides a row
    shares = [weight / sum(weights) for weight in weights]
    total = min(size // share for size, share in zip(sizes, shares, strict=True) if share)
    exact = [total * share for share in shares]
    quotas = [int(rows) for rows in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: quotas[index] - exact[index])
    for index in by_remainder[: total - sum(quotas)]:
        quotas[index] += 1
    for index, (quota, prob) in enumerate(zip(quotas, probs, strict=True)):
        if prob > 0 and quota == 0:
            raise DataError(
                f"the weight {prob} of dataset {index} gives it no row in an epoch of {total}: raise it "
                "(data.prompt_probs, or data.probs), set it to 0, or give the other datasets more rows"
            )
    return quotas
