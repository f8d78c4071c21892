"""Records ⇄ Arrow tables ⇄ the bytes of a shard.

::

    list[Trajectory] ─ columns ─▶ pa.Table ─ tables ─▶ bytes ─▶ object store

A missing log-prob is an error here, never a default: nothing unusable is published.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from rlhf_core.errors import CorruptShardError, StorageError
from rlhf_core.records import (
    ActionRange,
    Experience,
    ImageRef,
    RewardResult,
    RewardStatus,
    SamplingParams,
    StepReward,
    StopReason,
    Trajectory,
    VersionSpan,
)
from rlhf_core.storage.shards import schema
from rlhf_core.storage.shards.columns import (
    Ragged,
    arrays_of,
    metrics_of,
    metrics_to_arrow,
    structs_of,
    structs_to_arrow,
)
from rlhf_core.storage.shards.tables import Encoded, decode_table, encode_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_JSON = json.JSONEncoder(ensure_ascii=False)
_SAMPLING_FIELDS = [field.name for field in fields(SamplingParams)]


class _StoredImage(NamedTuple):
    sha256: str
    uri: str


@dataclass(frozen=True, slots=True)
class RewardRow:
    """One row of the reward shards: the result for one sample, shared by its segments."""

    group_id: str
    sample_index: int
    result: RewardResult


def encode_trajectories(rows: Sequence[Trajectory]) -> Encoded:
    """One shard of trajectories.

    Raises:
        StorageError: a row that could not be trained on: a log-prob that is missing or no number, an action range
            outside its tokens, a label that is no JSON. The message names the row.
    """
    tokens = Ragged("token_ids", [row.token_ids for row in rows], np.int32)
    logprobs = Ragged("rollout_logprobs", [row.rollout_logprobs for row in rows], np.float32)
    _check_floats("rollout_logprobs", logprobs, tokens, rows)
    _check_ranges(tokens, rows)
    _check_images(tokens, rows)
    built = {
        **_image_columns(rows),
        "token_ids": tokens.to_arrow(schema.TOKENS),
        "rollout_logprobs": logprobs.to_arrow(schema.FLOATS),
        "label": [_to_json(row.label, "label", row) for row in rows],
        "messages": [_to_json(row.messages, "messages", row) for row in rows],
        "sampling": [_sampling_json(row.sampling) for row in rows],
        "seed": [row.sampling.seed for row in rows],
    }
    return _encode(rows, built, schema.TRAJECTORY)


def encode_rewards(rows: Sequence[RewardRow]) -> Encoded:
    """One shard of reward results."""
    results = [row.result for row in rows]
    built: dict[str, Any] = {
        "group_id": [row.group_id for row in rows],
        "sample_index": [row.sample_index for row in rows],
    }
    return _encode(results, built, schema.REWARD)


def encode_experience(rows: Sequence[Experience]) -> Encoded:
    """One shard of experience; raises ``StorageError`` for a float column that is not ``[T]`` finite numbers."""
    tokens = Ragged("token_ids", [row.token_ids for row in rows], np.int32)
    built: dict[str, Any] = {"token_ids": tokens.to_arrow(schema.TOKENS), **_image_columns(rows)}
    for name in _float_columns(schema.EXPERIENCE):
        column = Ragged(name, [getattr(row, name) for row in rows], np.float32)
        _check_floats(name, column, tokens, rows)
        built[name] = column.to_arrow(schema.FLOATS)
    _check_ranges(tokens, rows)
    _check_images(tokens, rows)
    return _encode(rows, built, schema.EXPERIENCE)


def decode_trajectories(data: bytes | memoryview) -> list[Trajectory]:
    """The rows of one shard. Their arrays are read-only views of its buffers."""
    return trajectories_of(decode_table(data, schema.TRAJECTORY))


def decode_rewards(data: bytes | memoryview) -> list[RewardRow]:
    """The rows of one shard."""
    return rewards_of(decode_table(data, schema.REWARD))


def decode_experience(data: bytes | memoryview) -> list[Experience]:
    """The rows of one shard. Their arrays are read-only views of its buffers."""
    return experience_of(decode_table(data, schema.EXPERIENCE))


def trajectories_of(table: pa.Table) -> list[Trajectory]:
    """The rows of a table. Their arrays are read-only views of its buffers."""
    return list(_rows(table, _trajectories))


def rewards_of(table: pa.Table) -> list[RewardRow]:
    """The rows of a table."""
    return list(_rows(table, _reward_rows))


def experience_of(table: pa.Table) -> list[Experience]:
    """The rows of a table. Their arrays are read-only views of its buffers."""
    return list(_rows(table, _experience))


def _encode(rows: Sequence[Any], built: dict[str, Any], table: pa.Schema) -> Encoded:
    """Fill every column of ``table`` from ``built``, or else from the rows' attributes, and serialise."""
    columns = []
    for column in table:
        try:
            values = built[column.name] if column.name in built else list(map(attrgetter(column.name), rows))
            columns.append(_to_arrow(column, values))
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise StorageError(f"column {column.name} cannot be stored: {error}") from error
    return encode_table(pa.Table.from_arrays(columns, schema=table))


def _to_arrow(column: pa.Field, values: Any) -> pa.Array:
    if isinstance(values, pa.Array):
        return values
    if pa.types.is_map(column.type):
        return metrics_to_arrow(values, column.type)
    if pa.types.is_list(column.type):
        return structs_to_arrow(column.name, values, column.type)
    array = pa.array(values, column.type)
    if array.null_count and not column.nullable:
        raise ValueError("a value is missing")
    return array


def _rows(table: pa.Table, make: Callable[[dict[str, Any]], Iterator[Any]]) -> Iterator[Any]:
    for batch in table.to_batches():
        yield from make(dict(zip(batch.schema.names, batch.columns, strict=True)))


def _trajectories(batch: dict[str, Any]) -> Iterator[Trajectory]:
    columns = _plain(batch, skip=frozenset({"seed"}))
    columns["action_ranges"] = structs_of(batch["action_ranges"], ActionRange)
    columns["version_spans"] = structs_of(batch["version_spans"], VersionSpan)
    columns["step_rewards"] = structs_of(batch["step_rewards"], StepReward)
    columns["images"] = _images(batch)
    columns["label"] = _from_json(columns["label"])
    columns["messages"] = _from_json(columns["messages"])
    columns["sampling"] = list(map(_sampling, _from_json(columns["sampling"])))
    columns["reward_status"] = list(map(RewardStatus, columns["reward_status"]))
    columns["stop_reason"] = list(map(StopReason, columns["stop_reason"]))
    return _records(Trajectory, columns)


def _reward_rows(batch: dict[str, Any]) -> Iterator[RewardRow]:
    columns = _plain(batch)
    columns["status"] = list(map(RewardStatus, columns["status"]))
    groups, samples = columns.pop("group_id"), columns.pop("sample_index")
    return map(RewardRow, groups, samples, _records(RewardResult, columns))


def _experience(batch: dict[str, Any]) -> Iterator[Experience]:
    columns = _plain(batch)
    columns["action_ranges"] = structs_of(batch["action_ranges"], ActionRange)
    columns["images"] = _images(batch)
    return _records(Experience, columns)


def _image_columns(rows: Sequence[Trajectory] | Sequence[Experience]) -> dict[str, list[list[tuple[Any, ...]]]]:
    """What an image is and where it is are two columns: the second came later, and no column is ever retyped."""
    return {
        "images": [[(image.sha256, image.uri) for image in row.images] for row in rows],
        "image_ranges": [[(image.start, image.end) for image in row.images] for row in rows],
    }


def _images(batch: dict[str, Any]) -> list[tuple[ImageRef, ...]]:
    shown = structs_of(batch["images"], _StoredImage)
    places = structs_of(batch["image_ranges"], ActionRange)
    return [_images_of_row(*row) for row in zip(shown, places, strict=True)]


def _images_of_row(shown: tuple[_StoredImage, ...], places: tuple[ActionRange, ...]) -> tuple[ImageRef, ...]:
    if shown and not places:  # written before places were: no run could show an image then
        places = (ActionRange(0, 0),) * len(shown)
    if len(shown) != len(places):
        raise CorruptShardError(f"a row has {len(shown)} images and {len(places)} places of images")
    return tuple(ImageRef(*image, *place) for image, place in zip(shown, places, strict=True))


def _plain(batch: dict[str, Any], skip: frozenset[str] = frozenset()) -> dict[str, list[Any]]:
    """Every column that needs no meaning to be read; lists of structs are left to the caller."""
    columns: dict[str, list[Any]] = {}
    for name, column in batch.items():
        if name in skip:
            continue
        if pa.types.is_map(column.type):
            columns[name] = metrics_of(column)
        elif not pa.types.is_list(column.type):
            columns[name] = column.to_pylist()
        elif not pa.types.is_struct(column.type.value_type):
            columns[name] = arrays_of(column)
    return columns


def _records(make: type[Any], columns: dict[str, list[Any]]) -> Iterator[Any]:
    """One ``make(...)`` per row; every column is a field of it."""
    return map(make, *(columns[field.name] for field in fields(make)))


def _check_floats(name: str, column: Ragged, tokens: Ragged, rows: Sequence[Any]) -> None:
    """Refuse a row whose floats are not one finite number per token."""
    present = np.fromiter((getattr(row, name) is not None for row in rows), np.bool_, len(rows))
    wrong = np.flatnonzero(present & (column.lengths != tokens.lengths))
    if wrong.size:
        row = int(wrong[0])
        raise StorageError(
            f"{_row_name(rows[row])}: {column.lengths[row]} {name} for {tokens.lengths[row]} tokens: one is missing; "
            "a row without every log-prob must be recorded as failed, not published"
        )
    finite = np.isfinite(column.values)
    if not finite.all():
        row, position = column.place(int(np.argmin(finite)))
        raise StorageError(
            f"{_row_name(rows[row])}: {name}[{position}] is {getattr(rows[row], name)[position]}: one is missing; "
            "a row without every log-prob must be recorded as failed, not published"
        )


def _check_ranges(tokens: Ragged, rows: Sequence[Any]) -> None:
    for row, length in zip(rows, tokens.lengths.tolist(), strict=True):
        for start, end in row.action_ranges:
            if not 0 <= start <= end <= length:
                raise StorageError(f"{_row_name(row)}: action range [{start}, {end}) leaves its {length} tokens")


def _check_images(tokens: Ragged, rows: Sequence[Any]) -> None:
    for row, length in zip(rows, tokens.lengths.tolist(), strict=True):
        done = 0
        for image in row.images:
            if not done <= image.start < image.end <= length:
                raise StorageError(
                    f"{_row_name(row)}: image {image.uri} is said to be at [{image.start}, {image.end}) of {length} tokens: it "
                    "has none there, or lies before or within the image in front of it"
                )
            done = image.end


def _float_columns(table: pa.Schema) -> list[str]:
    return [column.name for column in table if column.type == schema.FLOATS]


def _row_name(row: Trajectory | Experience) -> str:
    return f"group {row.group_id} sample {row.sample_index} segment {row.segment_index}"


def _to_json(value: Any, name: str, row: Trajectory) -> str | None:
    if value is None:
        return None
    try:
        return _JSON.encode(value)
    except (TypeError, ValueError) as error:
        raise StorageError(
            f"{_row_name(row)}: {name} of type {type(value).__name__} is no JSON value: {error}"
        ) from error


def _from_json(texts: list[str | None]) -> list[Any]:
    """A column of JSON values, read as one list: a call for each costs more than what it reads."""
    values: list[Any] = json.loads(f"[{','.join('null' if text is None else text for text in texts)}]")
    if len(values) != len(texts):
        raise CorruptShardError(f"{len(texts)} rows hold {len(values)} JSON values")
    return values


def _sampling_json(sampling: SamplingParams) -> str:
    return _JSON.encode({name: getattr(sampling, name) for name in _SAMPLING_FIELDS})


def _sampling(values: dict[str, Any]) -> SamplingParams:
    values["stop"] = tuple(values["stop"])
    return SamplingParams(**values)
