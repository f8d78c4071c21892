"""What a reward source is asked of a trajectory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.records import RewardRequest

if TYPE_CHECKING:
    from rlhf_core.records import Trajectory


def reward_request(row: Trajectory) -> RewardRequest:
    """The request for one episode, from its last segment."""
    return RewardRequest(
        query=row.prompt + (row.transcript or row.answer),
        prompt=row.prompt,
        answer=row.answer,
        label=row.label,
        group_id=row.group_id,
        sample_index=row.sample_index,
        datasource=row.datasource,
        token_ids=row.token_ids,
        messages=row.messages,
    )
