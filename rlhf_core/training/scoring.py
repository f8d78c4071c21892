"""Log-probs and values of rows under a model, without gradients: the one code path of policy, reference and critic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from rlhf_core.batching import collate_tokens, plan_forward
from rlhf_core.training.ahead import ahead

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from rlhf_core.batching import ImageRow, OptimizerStep, TokenBatch
    from rlhf_core.config import Config
    from rlhf_core.records import Experience
    from rlhf_core.training.model import TokenScores
    from rlhf_core.training.ranks import RankInfo
    from rlhf_core.training.visual import ImageReader


def score_rows(
    scorer: Callable[..., TokenScores],
    rows: Sequence[ImageRow],
    rank: RankInfo,
    config: Config,
    images: ImageReader | None = None,
) -> dict[int, NDArray[np.float32]]:
    """Log-probs of this rank's share of the rows: see ``map_rows``. ``scorer``: a ``TokenScorer``, or an engine around one."""

    def logprobs(batch: TokenBatch) -> torch.Tensor:
        return scorer(
            batch.input_ids_BT, batch.action_mask_BT, batch.temperature_B, want_entropy=False, images=batch.images
        ).logprobs_BT

    return map_rows(logprobs, rows, rank, config, images)


def map_rows(
    forward: Callable[[TokenBatch], torch.Tensor],
    rows: Sequence[ImageRow],
    rank: RankInfo,
    config: Config,
    images: ImageReader | None = None,
) -> dict[int, NDArray[np.float32]]:
    """One number a token of this rank's share of the rows: index of the row to ``[T]``. A collective.

    Of ranks that compute the same rows, one answers.

    Args:
        forward: a batch to ``[B, T]``, in eval mode.
        rows: all rows, the same on every rank.
        rank: who this process is.
        config: gives the sizes of the micro-batches.
        images: reads what the rows show; None: they are of tokens alone.

    Raises:
        TrainingError: a row does not fit into the token budget, or has an action that nothing predicts.
    """
    lengths = [len(row.token_ids) for row in rows]
    size = config.rollout.micro_batch_size
    packed = config.ds.packing_samples
    budget = rank.group_budget(config.scoring_token_budget)
    plan = plan_forward(lengths, rank.data_ranks, size, budget, packed)[rank.data_rank]
    parts = ([rows[i] for i in micro_batch.rows] for micro_batch in plan)
    batches = map(collate_tokens, parts) if images is None else ahead(images.tokens, parts)
    numbers = {}
    for micro_batch, batch in zip(plan, batches, strict=True):
        with torch.no_grad():
            numbers_BT = forward(batch.to(rank.torch_device))
        if rank.answers and not micro_batch.filler:
            for i, numbers_T in zip(micro_batch.rows, numbers_BT.cpu().numpy(), strict=True):
                numbers[i] = numbers_T[: lengths[i]].copy()
    return numbers


def first_bad_row(step: OptimizerStep, rows: Sequence[Experience]) -> Experience | None:
    """The first row of a step whose numbers are not all finite. Every rank sees all rows, so all decide alike."""
    for plan in step.micro_batches:
        for micro_batch in plan:
            for i in micro_batch.rows:
                row = rows[i]
                arrays = (
                    row.old_logprobs,
                    row.rollout_logprobs,
                    row.ref_logprobs,
                    row.advantages,
                    row.values,
                    row.returns,
                )
                if not all(np.isfinite(array).all() for array in arrays if array is not None):
                    return row
    return None
