import hashlib
import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_samples import assert_same, experience, reward_row, trajectory

from rlhf_core.errors import CorruptShardError, StorageError
from rlhf_core.records import (
    ActionRange,
    ImageRef,
    RewardResult,
    RewardStatus,
    SamplingParams,
    StepReward,
    StopReason,
    VersionSpan,
)
from rlhf_core.storage import RewardRow, shards
from rlhf_core.storage.shards import schema
from rlhf_core.storage.shards.tables import decode_table, encode_table

EVERYTHING = trajectory(
    round=3,
    segment_index=1,
    label={"answer": ["ä", 1, 2.5, None, {"deep": True}]},
    messages=[{"role": "user", "content": "漢字 🙂"}],
    prompt="漢字 🙂\n\x00",
    action_ranges=(ActionRange(1, 2), ActionRange(3, 5)),
    version_spans=(VersionSpan(1, 2, 2**40), VersionSpan(3, 5, 8)),
    step_rewards=(StepReward(1, 0.1), StepReward(4, -2.0)),
    reward=0.1,
    score=1.0,
    reward_status=RewardStatus.OK,
    images=(ImageRef("ab" * 32, "images/ab.png", 0, 1),),
    sampling=SamplingParams(8, 0.7, 0.9, 50, 1, ("\n", "</s>"), True, None),
    metrics={"turns": 2.0, "länge": 1 / 3},
    started_at=1764438000.123456,
    seconds=1.5,
)
FAILED = trajectory(
    tokens=(),
    start=0,
    action_ranges=(),
    version_spans=(),
    stop_reason=StopReason.ERROR,
    error="boom",
    label=None,
    answer="",
)


@pytest.mark.parametrize("row", [trajectory(), EVERYTHING, FAILED], ids=["plain", "everything", "failed and empty"])
def test_a_trajectory_comes_back_field_by_field(row):
    (back,) = shards.decode_trajectories(shards.encode_trajectories([row]).data)

    assert_same(row, back)


@pytest.mark.parametrize("label", [None, "2", 2, 2.0, True, "", [], {}, [1, "1", [None]], "é漢\\\"'"])
def test_a_label_keeps_its_type(label):
    (back,) = shards.decode_trajectories(shards.encode_trajectories([trajectory(label=label)]).data)

    assert back.label == label
    assert type(back.label) is type(label)


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 600])
def test_any_number_of_rows_keeps_its_order(count):
    rows = [trajectory(f"g{i}", i, tuple(range(i % 7 + 1)), 0) for i in range(count)]

    back = shards.decode_trajectories(shards.encode_trajectories(rows).data)

    assert [row.key for row in back] == [row.key for row in rows]
    assert [row.token_ids.tolist() for row in back] == [row.token_ids.tolist() for row in rows]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=20), max_size=12))
def test_any_tokens_come_back(token_lists):
    rows = [trajectory(sample=i, tokens=tuple(tokens), start=0) for i, tokens in enumerate(token_lists)]

    back = shards.decode_trajectories(shards.encode_trajectories(rows).data)

    assert [row.token_ids.tolist() for row in back] == token_lists


def test_logprobs_come_back_bit_by_bit():
    logprobs = np.array([0, -1e-38, -1.1920929e-07, -87.3, -0.0], np.float32)

    (back,) = shards.decode_trajectories(shards.encode_trajectories([trajectory(rollout_logprobs=logprobs)]).data)

    assert back.rollout_logprobs.tobytes() == logprobs.tobytes()


def test_equal_rows_make_equal_bytes():
    assert shards.encode_trajectories([EVERYTHING] * 300).data == shards.encode_trajectories([EVERYTHING] * 300).data


@pytest.mark.parametrize("length", [0, 4])
def test_experience_comes_back_field_by_field(length):
    numbers = np.full(length, -0.25, np.float32)
    ranges = (ActionRange(0, length),)
    rows = [
        experience(length=length, action_ranges=ranges),
        experience("é", 1, length, ref_logprobs=numbers, constrained=True, action_ranges=ranges),
        experience("g", 2, length, values=numbers, action_ranges=ranges),
    ]

    back = shards.decode_experience(shards.encode_experience(rows).data)

    for row, found in zip(rows, back, strict=True):
        assert_same(row, found)


@pytest.mark.parametrize(
    "result",
    [
        RewardResult(RewardStatus.OK, 0.1, 1.0, {"exact": 0.0, "format": 1.0}, None, 0.2),
        RewardResult(RewardStatus.ERROR, error="ValueError: é"),
        RewardResult(RewardStatus.TIMED_OUT, seconds=5.0),
        RewardResult(RewardStatus.SKIPPED),
    ],
    ids=lambda result: result.status.value,
)
def test_a_reward_comes_back(result):
    rows = [RewardRow("g0", 3, result)]

    assert shards.decode_rewards(shards.encode_rewards(rows).data) == rows


def test_a_failed_reward_is_not_a_zero():
    table = decode_table(
        shards.encode_rewards([RewardRow("g", 0, RewardResult(RewardStatus.ERROR, error="x"))]).data, schema.REWARD
    )

    assert table["reward"].to_pylist() == [None]


@pytest.mark.parametrize("missing", [np.nan, -np.inf, np.inf])
def test_a_missing_logprob_is_refused_and_placed(missing):
    logprobs = np.array([0, 0, 0, -1, missing], np.float32)
    rows = [trajectory(), trajectory("g7", 2, rollout_logprobs=logprobs)]

    with pytest.raises(StorageError, match=r"group g7 sample 2 segment 0: rollout_logprobs\[4\] is"):
        shards.encode_trajectories(rows)


def test_a_shorter_logprob_column_is_refused():
    row = trajectory("g7", rollout_logprobs=np.zeros(4, np.float32))

    with pytest.raises(StorageError, match="group g7 sample 0 segment 0: 4 rollout_logprobs for 5 tokens"):
        shards.encode_trajectories([trajectory(), row])


@pytest.mark.parametrize("name", ["old_logprobs", "ref_logprobs", "values"])
def test_experience_without_what_nobody_computed(name):
    rows = [experience(**{name: None}), experience("g1", 1, **{name: None})]

    assert [getattr(row, name) for row in shards.decode_experience(shards.encode_experience(rows).data)] == [None, None]


@pytest.mark.parametrize("name", ["old_logprobs", "ref_logprobs", "values", "advantages", "returns"])
def test_experience_with_a_missing_number_is_refused(name):
    with pytest.raises(StorageError, match=rf"{name}\[2\] is nan"):
        shards.encode_experience([experience(**{name: np.array([0, 0, np.nan, 0], np.float32)})])


@pytest.mark.parametrize("bounds", [(-1, 2), (3, 6), (4, 3)])
def test_an_action_range_outside_its_tokens_is_refused(bounds):
    with pytest.raises(StorageError, match="leaves its 5 tokens"):
        shards.encode_trajectories([trajectory(action_ranges=(ActionRange(*bounds),))])


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"label": object()}, "label of type object is no JSON"), ({"prompt": None}, "column prompt cannot be stored")],
)
def test_a_value_that_cannot_be_stored_is_named(changes, message):
    with pytest.raises(StorageError, match=message):
        shards.encode_trajectories([trajectory(**changes)])


def test_every_truncation_is_found():
    data = shards.encode_trajectories([trajectory(sample=i) for i in range(300)]).data

    for length in range(0, len(data), 101):
        with pytest.raises(CorruptShardError):
            shards.decode_trajectories(data[:length])


def test_another_table_is_refused():
    with pytest.raises(CorruptShardError, match="expected a trajectory shard, found 'reward'"):
        shards.decode_trajectories(shards.encode_rewards([reward_row()]).data)


def test_a_newer_schema_is_refused_with_the_remedy(monkeypatch):
    data = shards.encode_rewards([reward_row()]).data
    version = schema.SCHEMA_VERSION
    monkeypatch.setattr(schema, "SCHEMA_VERSION", version - 1)

    with pytest.raises(
        StorageError, match=f"schema version {version}; this software reads up to {version - 1}: upgrade it"
    ):
        shards.decode_rewards(data)


def test_only_the_columns_asked_for_are_read():
    data = shards.encode_trajectories([EVERYTHING]).data

    table = decode_table(data, schema.TRAJECTORY, ["answer", "seed"])

    assert sorted(table.column_names) == ["answer", "seed"]


def test_any_arrow_reader_reads_a_shard():
    table = pa.ipc.open_file(shards.encode_trajectories([EVERYTHING]).data).read_all()

    assert table["token_ids"].to_pylist() == [[11, 12, 13, 40, 2]]
    assert json.loads(table["label"][0].as_py())["answer"][0] == "ä"
    assert table.schema.metadata[b"rlhf.schema_version"] == str(schema.SCHEMA_VERSION).encode()


def test_a_label_that_is_more_than_one_value_is_corrupt():
    table = decode_table(shards.encode_trajectories([trajectory()]).data, schema.TRAJECTORY)
    place = table.schema.get_field_index("label")
    table = table.set_column(place, table.schema.field("label"), pa.array(["1,2"]))

    with pytest.raises(CorruptShardError, match="1 rows hold 2 JSON values"):
        shards.decode_trajectories(encode_table(table).data)


@pytest.mark.parametrize("rows", [0, 1, 255, 300, 3000])
@pytest.mark.parametrize("length", [0, 1, 700])
def test_rows_that_compression_makes_larger_fit_and_are_hashed_whole(rows, length):
    """Every value is random: nothing shrinks, and each small buffer grows."""
    random = np.random.default_rng(0)
    tokens = [random.integers(0, 2**31, length, np.int32) for _ in range(rows)]
    numbers = [random.integers(-(2**31), 2**31, length, np.int32).view(np.float32) for _ in range(rows)]
    offsets = np.arange(rows + 1, dtype=np.int32) * length
    flat = [np.concatenate([np.empty(0, kind), *parts]) for kind, parts in ((np.int32, tokens), (np.float32, numbers))]
    columns = {
        field.name: pa.ListArray.from_arrays(offsets, pa.array(flat[field.type == schema.FLOATS]), type=field.type)
        if field.type in (schema.TOKENS, schema.FLOATS)
        else pa.array(
            [random.bytes(3).hex()] * rows if field.type == pa.string() else random.integers(0, 2, rows)
        ).cast(field.type)
        for field in schema.EXPERIENCE
        if field.name not in ("action_ranges", "images", "image_ranges")
    }
    one = {"sha256": random.bytes(32).hex(), "uri": f"images/{random.bytes(32).hex()}.png", "start": 0, "end": 1}
    for name in ("action_ranges", "images", "image_ranges"):
        kind = schema.EXPERIENCE.field(name).type
        columns[name] = pa.array([[{field.name: one[field.name] for field in kind.value_type}]] * rows, kind)
    table = pa.table(columns).select(schema.EXPERIENCE.names).cast(schema.EXPERIENCE)

    shard = encode_table(table)

    assert shard.sha256 == hashlib.sha256(shard.data).hexdigest()
    assert decode_table(shard.data, schema.EXPERIENCE).num_rows == rows


@pytest.mark.agents
def test_experience_keeps_its_images_and_where_they_are():
    images = (ImageRef("ab" * 32, "images/ab.png", 0, 1), ImageRef("cd" * 32, "images/cd.png", 1, 3))

    data = shards.encode_experience([experience(), experience("g1", images=images)]).data

    assert [row.images for row in shards.decode_experience(data)] == [(), images]


@pytest.mark.agents
@pytest.mark.parametrize("places", [[(2, 2)], [(3, 6)], [(-1, 2)], [(0, 3), (2, 4)], [(2, 3), (0, 1)]])
def test_an_image_without_tokens_of_its_own_is_not_stored(places):
    row = trajectory("g7", images=tuple(ImageRef("ab", "images/ab.png", *place) for place in places))

    with pytest.raises(StorageError, match=r"group g7 sample 0 segment 0: image images/ab.png is said to be at"):
        shards.encode_trajectories([row])
