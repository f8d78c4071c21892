import logging
import pickle
import shutil

import pytest

from rlhf_core.errors import ConflictError, CorruptShardError, StorageError
from rlhf_core.storage import CheckpointStore


@pytest.fixture
def checkpoints(run_store):
    return CheckpointStore(run_store)


@pytest.fixture
def state(tmp_path):
    """A folder with a nested, an empty and a binary file."""
    folder = tmp_path / "state"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "weights").write_bytes(bytes(range(256)) * 10)
    (folder / "empty").write_bytes(b"")
    (folder / "deep" / "er" / "x").write_bytes(b"x")
    return folder


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def complete(checkpoints, version, state, **body):
    checkpoints.commit(version, body, checkpoints.add_files(version, state, "model"))


def test_a_checkpoint_comes_back(checkpoints, state, tmp_path):
    complete(checkpoints, 3, state, cursor=[1, 2])

    version, body = checkpoints.newest()
    checkpoints.download(3, tmp_path / "back", "model")

    assert (version, body["cursor"]) == (3, [1, 2])
    assert body == checkpoints.get(3)
    assert contents(tmp_path / "back") == contents(state)


def test_case_18_an_empty_folder_is_no_checkpoint(local_run, tmp_path):
    checkpoints = CheckpointStore(local_run)
    assert checkpoints.newest() is None

    (tmp_path / "runs" / "run" / "checkpoints" / "v00000004").mkdir(parents=True)

    assert checkpoints.newest() is None
    assert checkpoints.versions() == []
    assert checkpoints.get(4) is None


def test_case_18_asking_for_an_absent_checkpoint_names_its_path(checkpoints, tmp_path):
    with pytest.raises(CorruptShardError, match=r"checkpoints/v00000004 is incomplete: checkpoint\.json is missing"):
        checkpoints.download(4, tmp_path / "back")


def test_files_are_invisible_until_the_commit(checkpoints, state):
    checkpoints.add_files(1, state)

    assert checkpoints.newest() is None
    assert checkpoints.versions() == []


def test_several_ranks_write_one_checkpoint(checkpoints, state, tmp_path):
    entries = [entry for rank in range(3) for entry in checkpoints.add_files(1, state, f"rank{rank}")]
    checkpoints.commit(1, {}, entries)

    checkpoints.download(1, tmp_path / "all")

    assert len(checkpoints.files(1)) == 9
    assert contents(tmp_path / "all" / "rank2") == contents(state)


def test_a_prefix_is_a_folder_not_the_start_of_a_name(checkpoints, state):
    checkpoints.commit(1, {}, checkpoints.add_files(1, state, "rank1") + checkpoints.add_files(1, state, "rank10"))

    assert {entry.path.split("/")[0] for entry in checkpoints.files(1, "rank1")} == {"rank1"}


@pytest.mark.parametrize("harm", ["delete", "shorten"])
def test_case_9_a_marker_without_its_weights_is_passed_over_with_a_warning(checkpoints, state, caplog, harm):
    complete(checkpoints, 1, state)
    complete(checkpoints, 2, state)
    path = "checkpoints/v00000002/model/weights"
    if harm == "delete":
        checkpoints.run_store.objects.delete(path)
    else:
        checkpoints.run_store.objects.put(path, b"short")

    with caplog.at_level(logging.WARNING):
        version, _ = checkpoints.newest()

    assert version == 1
    assert "v00000002 is incomplete: model/weights" in caplog.text


def test_a_damaged_marker_is_passed_over(checkpoints, state, caplog):
    complete(checkpoints, 1, state)
    complete(checkpoints, 2, state)
    checkpoints.run_store.objects.put("checkpoints/v00000002/checkpoint.json", b"{")

    assert checkpoints.newest()[0] == 1
    assert "v00000002/checkpoint.json is no document" in caplog.text


def test_a_flipped_byte_in_the_weights_is_found(checkpoints, state, tmp_path):
    complete(checkpoints, 1, state)
    data = bytearray((state / "weights").read_bytes())
    data[77] ^= 1
    checkpoints.run_store.objects.put("checkpoints/v00000001/model/weights", bytes(data))

    with pytest.raises(CorruptShardError, match="model/weights is damaged"):
        checkpoints.download(1, tmp_path / "back")
    with pytest.raises(CorruptShardError, match="model/weights is damaged"):
        checkpoints.open_folder(1, tmp_path / "back", "model")


def test_case_123_the_local_disk_is_lost_and_another_process_resumes(checkpoints, state, tmp_path):
    saved = contents(state)
    complete(checkpoints, 5, state, cursor={"epoch": 1, "offset": 40})
    shutil.rmtree(state)
    elsewhere = pickle.loads(pickle.dumps(checkpoints))

    version, body = elsewhere.newest()
    elsewhere.download(version, tmp_path / "other disk", "model")

    assert (version, body["cursor"]) == (5, {"epoch": 1, "offset": 40})
    assert contents(tmp_path / "other disk") == saved


def test_a_local_store_writes_weights_once_and_opens_them_in_place(local_run, state, tmp_path):
    checkpoints = CheckpointStore(local_run)
    complete(checkpoints, 1, state)

    folder = checkpoints.open_folder(1, tmp_path / "unused", "model")

    assert (folder / "weights").samefile(state / "weights")
    assert not (tmp_path / "unused").exists()


def test_a_remote_store_opens_a_folder_by_downloading_it(scripted, local_run, state, tmp_path):
    checkpoints = CheckpointStore(type(local_run)("run", "scripted://bucket"))
    complete(checkpoints, 1, state)

    folder = checkpoints.open_folder(1, tmp_path / "staging", "model")

    assert contents(folder) == contents(state)


def test_a_commit_without_all_its_files_is_refused(checkpoints, state):
    entries = checkpoints.add_files(1, state)
    checkpoints.run_store.objects.delete("checkpoints/v00000001/weights")

    with pytest.raises(StorageError, match="cannot be completed: weights is missing"):
        checkpoints.commit(1, {}, entries)
    assert checkpoints.newest() is None


def test_a_complete_checkpoint_never_changes(checkpoints, state):
    complete(checkpoints, 1, state, loss=0.5)

    with pytest.raises(ConflictError, match="complete already"):
        checkpoints.add_files(1, state)
    with pytest.raises(ConflictError):
        checkpoints.commit(1, {"loss": 0.6}, [])


def test_versions_are_ascending(checkpoints, state):
    for version in (12, 3, 100000000):
        complete(checkpoints, version, state)

    assert checkpoints.versions() == [3, 12, 100000000]
    assert checkpoints.newest()[0] == 100000000
