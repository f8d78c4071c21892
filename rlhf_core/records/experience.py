"""What the update stage trains on: a trajectory with everything the loss needs, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rlhf_core.records.trajectory import ActionRange, ImageRef


@dataclass(frozen=True, slots=True, eq=False)
class Experience:
    """One row of the experience shards. ``T`` = ``len(token_ids)``; every array is 0 outside the action ranges."""

    group_id: str
    sample_index: int
    segment_index: int
    token_ids: NDArray[np.int32]  # [T]
    action_ranges: tuple[ActionRange, ...]
    rollout_logprobs: NDArray[np.float32]  # [T] as sampled
    old_logprobs: NDArray[np.float32] | None  # [T] the trainer's before the update; None: the update's own
    ref_logprobs: NDArray[np.float32] | None  # [T] None without a reference model
    values: NDArray[np.float32] | None  # [T] None without a critic
    advantages: NDArray[np.float32]  # [T]
    returns: NDArray[np.float32]  # [T]
    reward: float  # raw
    shaped_reward: float  # what the estimator made of it
    temperature: float
    constrained: bool  # rollout log-probs are renormalised: kept out of the mismatch correction
    images: tuple[ImageRef, ...] = ()  # what the placeholder tokens show

    @property
    def num_actions(self) -> int:
        """Tokens the policy spoke."""
        return sum(r.end - r.start for r in self.action_ranges)
