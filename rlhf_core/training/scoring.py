"""Log-probs of rows under a model, without gradients: the one code path of the policy and of the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlhf_core.batching import collate_tokens, plan_forward

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from rlhf_core.batching import TokenRow
    from rlhf_core.config import Config
    from rlhf_core.training.model import TokenScores
    from rlhf_core.training.ranks import RankInfo


def score_rows(
    forward: Callable[..., TokenScores],
    rows: Sequence[TokenRow],
    rank: RankInfo,
    config: Config,
) -> dict[int, NDArray[np.float32]]:
    """Log-probs of this rank's share of the rows: index of the row to ``[T]``, 0 outside actions. A collective.

    Args:
        forward: a ``TokenScorer``, or an engine around one, in eval mode.
        rows: all rows, the same on every rank.
        rank: who this process is.
        config: gives the sizes of the micro-batches.

    Raises:
        TrainingError: a row does not fit into the token budget, or has an action that nothing predicts.
    """
    lengths = [len(row.token_ids) for row in rows]
    size, budget = config.rollout.micro_batch_size, _token_budget(config)
    plan = plan_forward(lengths, rank.world_size, size, budget)[rank.rank]
    scored = {}
    for micro_batch in plan:
        batch = collate_tokens([rows[i] for i in micro_batch.rows]).to(rank.torch_device)
        with torch.no_grad():
            scores = forward(batch.input_ids_BT, batch.action_mask_BT, batch.temperature_B, want_entropy=False)
        if not micro_batch.filler:
            for i, logprobs_T in zip(micro_batch.rows, scores.logprobs_BT.cpu().numpy(), strict=True):
                scored[i] = logprobs_T[: lengths[i]].copy()
    return scored


def _token_budget(config: Config) -> int | None:
    if not config.train.dynamic_batch_enable:
        return None
    return config.rollout.max_tokens_per_gpu or config.train.max_tokens_per_gpu
