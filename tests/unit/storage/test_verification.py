"""Whatever is missing or altered in a run is found, and named by its path and by the document that tells."""

import threading

import pytest
from storage_samples import reward_row, trajectory
from whole_run import VERSION, flip, part_body, write_iteration, write_run

from rlhf_core.errors import StorageError
from rlhf_core.records import Stage
from rlhf_core.storage import CheckpointStore, ObjectStore, RunStore
from rlhf_core.storage.audit.verification import verify
from rlhf_core.storage.documents import encode_document


@pytest.fixture
def store(tmp_path):
    run = RunStore("run", str(tmp_path / "runs"))
    write_run(run, tmp_path / "local")
    return run


@pytest.fixture
def remote(tmp_path):
    run = RunStore("run", f"memory://{tmp_path.name}")
    write_run(run, tmp_path / "remote")
    return run


def problems(store, version=None):
    return {fault.path: (fault.kind, fault.named_by) for fault in verify(store, version).faults}


def part_of(store, iteration, stage):
    return store.stage(iteration, stage)[0].parts[0].path


def test_a_whole_run_has_no_fault(store):
    told = []

    found = verify(store, progress=lambda done, total: told.append((done, total)))

    assert (found.ok, found.unnamed) == (True, 0)
    assert found.documents == 1 + 2 * 4 + 1 + 2 + 1 + 3  # run, stages, round, checkpoints, evaluation, pointers and end
    assert (
        found.objects == (2 + 1 + 1) * 2 + 2 + 2 * 3 + 1
    )  # of iterations, of the group that waits, of checkpoints, eval
    assert found.bytes == sum(store.objects.sizes().values())
    assert told[-1][0] == told[-1][1] > 0
    assert [done for done, _ in told] == sorted(done for done, _ in told)


@pytest.mark.parametrize("stage", [Stage.ROLLOUT, Stage.REWARD, Stage.EXPERIENCE])
def test_a_flipped_byte_in_a_shard(store, stage):
    path = part_of(store, 1, stage)
    flip(store, path)

    (fault,) = verify(store).faults

    assert (fault.path, fault.kind, fault.named_by) == (path, "altered", f"iterations/00000001/{stage}.json")
    assert f"recorded was {path.rpartition('-')[2].removesuffix('.arrow')}" in fault.problem


@pytest.mark.parametrize("name", ["hf/model.safetensors", "hf/config.json", "state.pt"])
def test_a_flipped_byte_in_a_file_of_a_checkpoint(store, name):
    flip(store, f"checkpoints/v00000001/{name}")

    assert problems(store) == {
        f"checkpoints/v00000001/{name}": ("altered", "checkpoints/v00000001/checkpoint.json"),
    }


def test_a_flipped_byte_in_any_document(store):
    for path in [path for path in store.objects.list() if path.endswith(".json") and "/hf/" not in path]:
        whole = store.objects.read(path)
        flip(store, path)
        found = problems(store)
        store.objects.put(path, whole)

        assert found[path][0] == "altered", path


def test_any_object_that_is_gone_is_missed(store):
    """But for what nothing else tells of: the end of a run, its pointers, its evaluations."""
    alone = {"finished.json", "latest.json", "best.json", "eval/v00000002.json"}
    for path in store.objects.list():
        data = store.objects.read(path)
        store.objects.delete(path)
        found = problems(store)
        store.objects.put(path, data)

        assert (path in found) is (path not in alone), path
        assert path in alone or found[path][0] == "missing", path


def test_every_fault_is_named_not_only_the_first(store):
    flip(store, part_of(store, 0, Stage.ROLLOUT))
    store.objects.delete(part_of(store, 0, Stage.REWARD))
    flip(store, "checkpoints/v00000002/state.pt")
    truncated = part_of(store, 1, Stage.EXPERIENCE)
    store.objects.put(truncated, store.objects.read(truncated)[:-1])

    found = verify(store).faults

    assert sorted(fault.kind for fault in found) == ["altered", "altered", "altered", "missing"]
    assert any("bytes, recorded were" in fault.problem for fault in found if fault.path == truncated)


def test_a_manifest_of_another_run_is_foreign(store, tmp_path):
    other = RunStore("other", str(tmp_path / "others"))
    write_iteration(other, 0)
    path = f"iterations/00000000/{Stage.ROLLOUT}.json"
    store.objects.put(path, other.objects.read(path))

    kinds = {(fault.path, fault.kind) for fault in verify(store).faults}

    assert {(path, "foreign"), (path, "altered")} <= kinds  # its run, and the sha256 by which the reward stage knows it
    (problem,) = [fault.problem for fault in verify(store).faults if fault.kind == "foreign"]
    assert problem == "it does not belong there: its run_id is 'other'"


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("iterations/00000000/update.json", "iterations/00000001/update.json"),
        ("iterations/00000000/rollout.json", "iterations/00000000/reward.json"),
        ("iterations/00000001/rounds/00.json", "iterations/00000000/rounds/00.json"),
        ("checkpoints/v00000001/checkpoint.json", "checkpoints/v00000002/checkpoint.json"),
        ("eval/v00000002.json", "eval/v00000001.json"),
    ],
)
def test_a_document_in_the_place_of_another_is_foreign(store, source, target):
    store.objects.put(target, store.objects.read(source))

    assert (target, "foreign") in {(fault.path, fault.kind) for fault in verify(store).faults}


def test_a_checkpoint_that_its_update_did_not_make(store, tmp_path):
    checkpoints = CheckpointStore(store)
    files = checkpoints.files(2)
    store.objects.delete("checkpoints/v00000002/checkpoint.json")
    checkpoints.commit(2, {"version": 2, "digest": "of other weights"}, files)

    (fault,) = verify(store).faults

    assert (fault.path, fault.kind) == ("checkpoints/v00000002/checkpoint.json", "contradiction")
    assert fault.problem == "its digest is of other weights, the update that made the version says d2"
    assert fault.named_by == "iterations/00000001/update.json"


def test_one_version_needs_only_what_made_it(store):
    flip(store, part_of(store, 1, Stage.EXPERIENCE))
    store.objects.delete("checkpoints/v00000002/state.pt")

    assert problems(store, version=1) == {}
    assert len(problems(store, version=2)) == 2


def test_a_version_without_its_update(store):
    store.objects.delete("iterations/00000000/update.json")

    assert problems(store, version=1) == {
        "iterations/00000000/update.json": ("missing", "checkpoints/v00000001/checkpoint.json")
    }


def test_what_a_writer_deletes_meanwhile_is_no_fault(store, monkeypatch):
    """A rotation between the documents and the files they name."""
    hashed, rotated = ObjectStore.hashed, threading.Event()

    def rotating(self, path):
        if not rotated.is_set():
            rotated.set()
            CheckpointStore(store).delete(1)
            store.set_pointer("best", {"version": 2, "value": 2.0, "key": "k"})
        return hashed(self, path)

    monkeypatch.setattr(ObjectStore, "hashed", rotating)

    found = verify(store)

    assert [fault.named_by for fault in found.faults] == []


def test_a_store_that_does_not_answer_is_told_of_by_its_object(store, monkeypatch):
    path, hashed = part_of(store, 0, Stage.REWARD), ObjectStore.hashed

    def refusing(self, asked):
        if asked == path:
            raise StorageError("no answer within 60 s")
        return hashed(self, asked)

    monkeypatch.setattr(ObjectStore, "hashed", refusing)

    assert problems(store) == {path: ("unreadable", "iterations/00000000/reward.json")}


def test_documents_of_kinds_that_came_later_are_looked_at_too(store):
    """And what they name as parts."""
    part = part_body(store.publish_rewards(0, [reward_row("of later")]))
    store.objects.put("later/kind.json", encode_document({"inside": [{"deep": part}]}, "later"))
    assert (verify(store).ok, verify(store).unnamed) == (True, 0)

    flip(store, part["path"])
    flip(store, "later/kind.json", position=40)

    assert problems(store) == {"later/kind.json": ("altered", "later/kind.json")}  # what it names is not known then
    flip(store, "later/kind.json", position=40)
    assert problems(store) == {part["path"]: ("altered", "later/kind.json")}


def test_files_of_others_are_no_fault(store):
    store.objects.put("notes.json", b'{"by": "hand"}')
    store.objects.put("iterations/00000000/rollout/notes.txt", b"x")
    store.publish_trajectories(0, [trajectory("of an attempt that died")])

    found = verify(store)

    assert (found.ok, found.unnamed) == (True, 3)


def test_a_run_without_run_json_and_no_run_at_all(store, tmp_path):
    store.objects.delete("run.json")

    assert problems(store) == {"run.json": ("missing", "run.json")}
    assert not verify(RunStore("none", str(tmp_path))).ok


def test_objects_are_read_in_pieces_here_and_elsewhere(store, remote, monkeypatch):
    monkeypatch.setattr("rlhf_core.storage.backends.local.PIECE", 300)
    monkeypatch.setattr("rlhf_core.storage.backends.remote.DOWNLOAD_CHUNK", 300)
    path = part_of(store, 1, Stage.EXPERIENCE)
    flip(remote, path, position=400)

    assert verify(store, VERSION).ok
    assert problems(remote) == {path: ("altered", "iterations/00000001/experience.json")}
