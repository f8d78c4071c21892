"""Shards: what is in them, and how it becomes bytes.

::

    records ─ columns ─▶ Arrow table of a schema ─ tables ─▶ bytes
"""

from rlhf_core.storage.shards.records import (
    RewardRow,
    decode_experience,
    decode_rewards,
    decode_trajectories,
    encode_experience,
    encode_rewards,
    encode_trajectories,
    experience_of,
    rewards_of,
    trajectories_of,
)

__all__ = [
    "RewardRow",
    "decode_experience",
    "decode_rewards",
    "decode_trajectories",
    "encode_experience",
    "encode_rewards",
    "encode_trajectories",
    "experience_of",
    "rewards_of",
    "trajectories_of",
]
