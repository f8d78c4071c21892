"""A log of an older version is read as one of the present version; one of a newer version is refused.

``tests/data/log-…`` are logs as each version wrote them (``frozen_log``); nothing ever changes them.
"""

import shutil

import frozen_log
import pyarrow as pa
import pytest
from storage_samples import assert_same, reward_row, trajectory
from whole_run import VERSION

from rlhf_core.errors import CorruptShardError, StorageError
from rlhf_core.records import Stage
from rlhf_core.storage import CheckpointStore, RunStore, documents, shards, trajectories
from rlhf_core.storage.shards import schema
from rlhf_core.storage.shards.tables import decode_table, encode_table

LOGS = sorted(frozen_log.DATA.glob("log-*"))
NOW = schema.SCHEMA_VERSION
LATER = NOW + 1
KINDS = {"tags": (pa.list_(pa.string()), []), "notes": (schema.METRICS, {}), "length": (pa.int32(), 7)}
KINDS |= {"flag": (pa.bool_(), False), "judge": (pa.string(), None)}


def test_a_log_of_the_present_versions_is_kept():
    """Where this fails: a schema has changed; python tests/unit/storage/frozen_log.py"""
    assert frozen_log.folder() in LOGS


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.name)
def test_the_shards_of_every_version_load(log):
    store = RunStore("run", str(log))
    read = {
        Stage.ROLLOUT: (store.read_trajectories, frozen_log.TRAJECTORIES),
        Stage.REWARD: (store.read_rewards, frozen_log.REWARDS),
        Stage.EXPERIENCE: (store.read_experience, frozen_log.EXPERIENCE),
    }

    for stage, (rows_of, expected) in read.items():
        rows = rows_of(store.stage(frozen_log.ITERATION, stage)[0].parts)
        if log.name.startswith("log-shards1-") and stage is not Stage.REWARD:
            expected = map(frozen_log.without_images_in_place, expected)
        for row, written in zip(rows, expected, strict=True):
            assert_same(row, written)


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.name)
@pytest.mark.parametrize("later", [0, 1], ids=["now", "after the next change of documents"])
def test_the_documents_of_every_version_load(log, later, monkeypatch):
    monkeypatch.setattr(documents, "SCHEMA_VERSION", documents.SCHEMA_VERSION + later)
    store = RunStore("run", str(log))

    assert store.read_run()["run_id"] == "run"
    assert store.newest_update()[1].body == {"version": VERSION, "digest": "d2"}
    assert [played.number for played in store.rounds(1)] == [0]
    assert store.read_evaluation(VERSION)["version"] == VERSION
    assert store.pointer("latest") == {"version": VERSION}
    assert store.read_end() == VERSION
    assert CheckpointStore(store).newest()[0] == VERSION


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.name)
def test_the_trajectories_of_every_version_are_asked(log):
    found = trajectories(RunStore("run", str(log)), where="reward < 0", columns=["iteration", "group_id", "answer"])

    assert found.to_pylist() == [{"iteration": frozen_log.ITERATION, "group_id": "g0", "answer": " 2"}]


def test_what_is_kept_is_what_the_present_version_writes():
    part = RunStore("run", str(frozen_log.folder())).stage(frozen_log.ITERATION, Stage.ROLLOUT)[0].parts[0]
    data = shards.encode_trajectories(frozen_log.TRAJECTORIES).data

    assert decode_table(data, schema.TRAJECTORY).equals(
        RunStore("run", str(frozen_log.folder())).read_table(part, schema.TRAJECTORY), check_metadata=True
    )


@pytest.fixture
def next_version(monkeypatch):
    """The reward table after a change: every kind of column is added."""
    old = encode_table(decode_table(shards.encode_rewards([reward_row()] * 3).data, schema.REWARD)).data
    added = [pa.field(name, kind, nullable=default is None) for name, (kind, default) in KINDS.items()]
    metadata = {**schema.REWARD.metadata, schema.VERSION_KEY: str(LATER).encode()}
    monkeypatch.setattr(schema, "REWARD", pa.schema([*schema.REWARD, *added], metadata=metadata))
    monkeypatch.setattr(schema, "SCHEMA_VERSION", LATER)
    since = {name: schema.Added(LATER, default) for name, (_, default) in KINDS.items()}
    monkeypatch.setattr(schema, "ADDED", {"reward": since})
    return old


def test_older_rows_hold_the_default_of_a_column_that_came_later(next_version):
    table = decode_table(next_version, schema.REWARD)

    assert table.column_names == schema.REWARD.names
    assert (
        table.select(list(KINDS)).to_pylist(maps_as_pydicts="strict")
        == [{"tags": [], "notes": {}, "length": 7, "flag": False, "judge": None}] * 3
    )


def test_columns_that_came_later_may_be_the_only_ones_asked_for(next_version):
    assert decode_table(next_version, schema.REWARD, ["length"]).to_pylist() == [{"length": 7}] * 3


def test_a_shard_of_the_version_with_a_column_must_have_it(next_version):
    table = decode_table(next_version, schema.REWARD).drop_columns(["length"])

    with pytest.raises(CorruptShardError, match=rf"schema version {LATER} lacks the columns \['length'\]"):
        decode_table(encode_table(table.replace_schema_metadata(schema.REWARD.metadata)).data, schema.REWARD)


def test_old_and_new_shards_of_one_run_are_one_dataset(tmp_path, monkeypatch):
    """The older part was written by the version before ``judge`` came to the trajectories."""
    store = RunStore("run", str(tmp_path))
    shutil.copytree(frozen_log.folder() / "run", tmp_path / "run")
    metadata = {**schema.TRAJECTORY.metadata, schema.VERSION_KEY: str(LATER).encode()}
    judge = pa.field("judge", pa.string(), nullable=False)
    newer = pa.schema([*schema.TRAJECTORY, judge], metadata=metadata)
    [old] = store.stage(frozen_log.ITERATION, Stage.ROLLOUT)[0].parts

    with monkeypatch.context() as patched:
        patched.setattr(schema, "TRAJECTORY", newer)
        patched.setattr(schema, "SCHEMA_VERSION", LATER)
        patched.setattr(schema, "ADDED", {"trajectory": {"judge": schema.Added(LATER, "none")}})
        table = store.read_table(old, newer)
        answers = trajectories(store, iteration=frozen_log.ITERATION, columns=["answer"])

    assert table["judge"].to_pylist() == ["none"] * 3
    assert answers["answer"].to_pylist() == [" 2", " 2", ""]


def test_a_column_that_was_taken_out_is_passed_over():
    table = decode_table(shards.encode_rewards([reward_row()]).data, schema.REWARD)
    fewer = schema.REWARD.remove(schema.REWARD.get_field_index("seconds"))

    assert decode_table(encode_table(table).data, fewer).column_names == fewer.names


@pytest.mark.parametrize("version", [str(LATER), "1000000"])
def test_a_newer_shard_is_refused_with_the_remedy_and_its_name(tmp_path, version, monkeypatch):
    store = RunStore("run", str(tmp_path))
    metadata = {**schema.TRAJECTORY.metadata, schema.VERSION_KEY: version.encode()}
    with monkeypatch.context() as patched:
        patched.setattr(schema, "TRAJECTORY", schema.TRAJECTORY.with_metadata(metadata))
        part = store.publish_trajectories(0, [trajectory()])

    with pytest.raises(StorageError, match=rf"{part.path}: .* version {version}; .* reads up to {NOW}: upgrade it"):
        store.read_trajectories([part])


@pytest.mark.parametrize("version", [b"", b"-1", b"one", b"\xff"])
def test_a_version_that_is_no_number_is_corrupt(version):
    table = decode_table(shards.encode_rewards([reward_row()]).data, schema.REWARD)
    table = table.replace_schema_metadata({**schema.REWARD.metadata, schema.VERSION_KEY: version})

    with pytest.raises(CorruptShardError, match="which is no number"):
        decode_table(encode_table(table).data, schema.REWARD)


def test_a_column_of_another_type_is_corrupt():
    table = decode_table(shards.encode_rewards([reward_row()]).data, schema.REWARD)
    other = table.set_column(1, "sample_index", table["sample_index"].cast(pa.int64()))

    with pytest.raises(CorruptShardError, match="column sample_index is int64, expected int32"):
        decode_table(encode_table(other).data, schema.REWARD)


def test_a_newer_document_is_refused_with_the_remedy_and_its_name(tmp_path, monkeypatch):
    store = RunStore("run", str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(documents, "SCHEMA_VERSION", documents.SCHEMA_VERSION + 1)
        store.write_run({"run_id": "run"})

    with pytest.raises(StorageError, match=r"run.json has schema version 2; this software reads up to 1: upgrade it"):
        store.read_run()
