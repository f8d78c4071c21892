"""What one run takes over from another: verified, whole, and its own from then on."""

import pytest
from storage_samples import trajectory

from rlhf_core.errors import CorruptShardError, StorageError
from rlhf_core.records import Stage, StageManifest
from rlhf_core.storage import CheckpointStore, ObjectStore, RunStore, adopt_newest_checkpoint, adopt_parts, adopt_stage


@pytest.fixture
def source(tmp_path):
    return RunStore("source", str(tmp_path))


@pytest.fixture
def own(tmp_path):
    return RunStore("own", str(tmp_path))


def publish(store, iteration):
    part = store.publish_trajectories(iteration, [trajectory(group_id=f"g{iteration}")])
    store.commit(
        StageManifest(store.run_id, iteration, Stage.ROLLOUT, (part,), 1, part.tokens, iteration, {"x": "y"}, {"a": 1})
    )
    return part


def save(store, version, tmp_path):
    folder = tmp_path / f"made-{version}"
    for name in ("state/rank0.pt", "critic/state/rank0.pt", "hf/model.safetensors"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(f"{version} {name}".encode())
    checkpoints = CheckpointStore(store)
    checkpoints.commit(version, {"digest": f"d{version}"}, checkpoints.add_files(version, folder))


def test_parts_are_the_same_bytes_under_another_iteration(source, own):
    part = publish(source, 4)

    (adopted,) = adopt_parts(own, source, [part], 0, Stage.ROLLOUT)

    assert adopted.path == part.path.replace("00000004", "00000000")
    assert own.read_part(adopted) == source.read_part(part)


def test_parts_outlive_their_source(source, own, tmp_path):
    (adopted,) = adopt_parts(own, source, [publish(source, 0)], 0, Stage.ROLLOUT)

    ObjectStore(str(tmp_path)).remove_folder("source")

    assert own.read_trajectories([adopted])[0].group_id == "g0"


def test_a_damaged_part_is_named_and_not_adopted(source, own, tmp_path):
    part = publish(source, 0)
    path = tmp_path / "source" / part.path
    path.write_bytes(path.read_bytes()[:-1] + b"!")

    with pytest.raises(CorruptShardError, match=r"source/iterations/00000000/rollout/.* is damaged"):
        adopt_parts(own, source, [part], 0, Stage.ROLLOUT)

    assert own.objects.list() == []


def test_a_stage_is_adopted_with_its_manifest_twice_as_once(source, own):
    publish(source, 0)

    for _ in range(2):
        adopt_stage(own, source, 0, Stage.ROLLOUT)

    manifest = own.stage(0, Stage.ROLLOUT)[0]
    assert (manifest.run_id, manifest.body, manifest.inputs) == ("own", {"a": 1}, {})
    assert own.read_trajectories(manifest.parts)[0].group_id == "g0"


def test_a_stage_that_is_not_complete_is_not_adopted(source, own):
    with pytest.raises(StorageError, match=r"rollout\.json is missing"):
        adopt_stage(own, source, 0, Stage.ROLLOUT)


def test_the_newest_whole_checkpoint_is_adopted_without_what_it_exports(source, own, tmp_path):
    for version in (2, 4, 6):
        save(source, version, tmp_path)
    damaged = tmp_path / "source/checkpoints/v00000004/state/rank0.pt"
    damaged.write_bytes(b"4 state/rank0.XX")

    assert adopt_newest_checkpoint(own, source, 5) == 2
    assert adopt_newest_checkpoint(own, source, 5) == 2

    held = CheckpointStore(own)
    assert held.versions() == [2]
    assert held.get(2)["digest"] == "d2"
    assert [entry.path for entry in held.files(2)] == ["critic/state/rank0.pt", "state/rank0.pt"]


def test_a_file_of_a_checkpoint_is_fetched_once_however_deep_it_lies(source, own, tmp_path, monkeypatch):
    """state/trainer.json and state/deepspeed/state/optimizer.pt: two folders, one of them below the other."""
    folder = tmp_path / "made"
    (folder / "state/deepspeed/state").mkdir(parents=True)
    for name in ("trainer.json", "deepspeed/state/optimizer.pt"):
        (folder / "state" / name).write_text(name)
    theirs = CheckpointStore(source)
    theirs.commit(1, {}, theirs.add_files(1, folder))
    fetched, get_file = [], ObjectStore.get_file

    def counted(store, path, local, **options):
        fetched.append(path)
        get_file(store, path, local, **options)

    monkeypatch.setattr(ObjectStore, "get_file", counted)

    assert adopt_newest_checkpoint(own, source, 1) == 1

    assert len(fetched) == len(set(fetched)) == 2


def test_without_a_checkpoint_training_begins_at_0(source, own):
    assert adopt_newest_checkpoint(own, source, 3) == 0
