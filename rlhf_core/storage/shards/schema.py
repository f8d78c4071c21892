"""The Arrow schemas of the shards: what each row holds, by name and type.

``B`` rows of ``T`` tokens each; every list column of a row has ``T`` entries unless its comment says otherwise.
Evaluation trajectories have the trajectory schema. The metadata names the table and the version of its schema.

A shard of an older version is read as one of the present version. To add a column: put it into its table below, count
``SCHEMA_VERSION`` up, and say in ``ADDED`` what older rows hold. A column is never renamed, retyped or given another
meaning: add one with another name. One that is taken out is passed over in older shards. One that may be null from now on
counts the version too: older software must not read the new shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

SCHEMA_VERSION = 3
TABLE_KEY = b"rlhf.table"
VERSION_KEY = b"rlhf.schema_version"


@dataclass(frozen=True)
class Added:
    """A column that the first version of its table did not have."""

    version: int  # the first that has it
    default: Any  # what rows of older versions hold: a plain value that Arrow converts to the column's type


ADDED: dict[str, dict[str, Added]] = {  # table -> column -> since when
    "trajectory": {"image_ranges": Added(2, []), "transcript": Added(2, "")},
    "experience": {"images": Added(2, []), "image_ranges": Added(2, [])},
}


def _column(name: str, kind: pa.DataType, *, null: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=null)


def _list(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("item", kind, nullable=False))


def _struct(**kinds: pa.DataType) -> pa.DataType:
    return pa.struct([pa.field(name, kind, nullable=False) for name, kind in kinds.items()])


def _schema(table: str, columns: list[pa.Field]) -> pa.Schema:
    return pa.schema(columns, metadata={TABLE_KEY: table.encode(), VERSION_KEY: str(SCHEMA_VERSION).encode()})


RANGE = _struct(start=pa.int32(), end=pa.int32())
SPAN = _struct(start=pa.int32(), end=pa.int32(), version=pa.int64())
STEP_REWARD = _struct(position=pa.int32(), reward=pa.float64())
IMAGE = _struct(sha256=pa.string(), uri=pa.string())
METRICS = pa.map_(pa.string(), pa.field("value", pa.float64(), nullable=False))
TOKENS = _list(pa.int32())
FLOATS = _list(pa.float32())

TRAJECTORY = _schema(
    "trajectory",
    [
        _column("run_id", pa.string()),
        _column("iteration", pa.int64()),
        _column("round", pa.int32()),
        _column("prompt_id", pa.string()),
        _column("group_id", pa.string()),
        _column("sample_index", pa.int32()),
        _column("segment_index", pa.int32()),
        _column("datasource", pa.string()),
        _column("prompt", pa.string()),
        _column("label", pa.string(), null=True),  # JSON; null: none
        _column("messages", pa.string(), null=True),  # JSON; null: none
        _column("token_ids", TOKENS),
        _column("action_ranges", _list(RANGE)),  # one per turn
        _column("rollout_logprobs", FLOATS),  # 0 outside actions
        _column("version_spans", _list(SPAN)),  # one per change of policy version
        _column("step_rewards", _list(STEP_REWARD)),  # one per rewarded turn
        _column("reward", pa.float64(), null=True),
        _column("score", pa.float64(), null=True),
        _column("reward_status", pa.string()),
        _column("stop_reason", pa.string()),
        _column("error", pa.string(), null=True),
        _column("answer", pa.string()),
        _column("images", _list(IMAGE)),  # one per image
        _column("seed", pa.int64(), null=True),  # also in ``sampling``; here to be searched for
        _column("sampling", pa.string()),  # JSON of SamplingParams
        _column("metrics", METRICS),
        _column("started_at", pa.float64()),  # unix seconds
        _column("seconds", pa.float64()),
        _column("image_ranges", _list(RANGE)),  # one per image: its placeholder tokens
        _column("transcript", pa.string()),  # "" where there is one turn
    ],
)

REWARD = _schema(
    "reward",
    [
        _column("group_id", pa.string()),
        _column("sample_index", pa.int32()),
        _column("status", pa.string()),
        _column("reward", pa.float64(), null=True),
        _column("score", pa.float64(), null=True),
        _column("metrics", METRICS),
        _column("error", pa.string(), null=True),
        _column("seconds", pa.float64()),
    ],
)

EXPERIENCE = _schema(
    "experience",
    [
        _column("group_id", pa.string()),
        _column("sample_index", pa.int32()),
        _column("segment_index", pa.int32()),
        _column("token_ids", TOKENS),
        _column("action_ranges", _list(RANGE)),  # one per turn
        _column("rollout_logprobs", FLOATS),
        _column("old_logprobs", FLOATS, null=True),  # since version 3
        _column("ref_logprobs", FLOATS, null=True),
        _column("values", FLOATS, null=True),
        _column("advantages", FLOATS),
        _column("returns", FLOATS),
        _column("reward", pa.float64()),
        _column("shaped_reward", pa.float64()),
        _column("temperature", pa.float64()),
        _column("constrained", pa.bool_()),
        _column("images", _list(IMAGE)),  # one per image
        _column("image_ranges", _list(RANGE)),  # one per image
    ],
)
