"""Only what no document names, and nobody will use, goes."""

import os
import time
import uuid

import pytest
from storage_samples import reward_row, trajectory
from whole_run import flip, part_body, write_iteration, write_run

from rlhf_core.errors import LeaseError, StorageError
from rlhf_core.records import Stage
from rlhf_core.storage import CheckpointStore, LeaseOwner, ObjectStore, RunStore, acquire
from rlhf_core.storage.audit import garbage
from rlhf_core.storage.audit.garbage import find_garbage, remove_garbage
from rlhf_core.storage.audit.verification import verify
from rlhf_core.storage.documents import encode_document


@pytest.fixture(params=["file", "memory"])
def store(request, tmp_path):
    root = str(tmp_path / "runs") if request.param == "file" else f"memory://{tmp_path.name}"
    run = RunStore("run", root)
    write_run(run, tmp_path / "local")
    return run


def left_over(store, iteration=0):
    """A part of an attempt that died before another completed the stage."""
    return store.publish_trajectories(iteration, [trajectory("dead")]).path


def content(store):
    """Everything but the lease, which removing takes."""
    return {path: store.objects.read(path) for path in store.objects.list() if not path.startswith("lease/")}


def test_a_whole_run_has_none_and_keeps_everything(store):
    before = content(store)

    removed = remove_garbage(store)

    assert (removed.pieces, removed.waiting, removed.unknown) == ((), {}, {})
    assert content(store) == before


def test_what_an_attempt_left_goes_and_nothing_else(store):
    before = content(store)
    parts = [left_over(store), store.publish_rewards(1, [reward_row("dead")]).path]
    parts.append(store.publish_eval_trajectories(2, [trajectory("dead")]).path)

    listed = find_garbage(store)
    told = []
    removed = remove_garbage(store, progress=lambda done, total: told.append((done, total)))

    assert sorted(piece.path for piece in listed.pieces) == sorted(parts)
    assert removed == listed
    assert listed.bytes == sum(int(path.split("t-")[1].split("b-")[0]) for path in parts)
    assert told == [(3, 3)]
    assert content(store) == before
    assert verify(store).ok


def test_listing_removes_nothing_and_takes_no_lease(store):
    left_over(store)
    before = store.objects.list()

    find_garbage(store)

    assert store.objects.list() == before


@pytest.mark.parametrize("stage", list(Stage)[:3])
def test_parts_of_a_stage_that_is_not_complete_wait_for_the_next_attempt(store, stage):
    part = store.publish_trajectories(2, [trajectory("g2")], stage)

    found = remove_garbage(store)

    assert (found.pieces, found.waiting) == ((), {part.path: part.bytes})
    assert store.published_parts(2, stage) == [part]


def test_parts_of_an_iteration_that_is_not_complete_wait_too(store):
    write_iteration(store, 2)
    path = left_over(store, 2)
    store.objects.delete("iterations/00000002/update.json")

    assert list(find_garbage(store).waiting) == [path]


def test_groups_that_wait_for_a_later_iteration_stay(store):
    """Only the round names them; no manifest does yet."""
    (played,) = store.rounds(1)
    waits = played.places["waits"]

    remove_garbage(store)

    assert waits not in [part.path for part in store.stage(1, Stage.ROLLOUT)[0].parts]
    assert store.read_trajectories(played.parts_of({"waits"}))
    assert store.read_rewards(played.reward_parts)


def test_what_any_document_mentions_stays(store):
    """Also one of a kind that this software does not know, whether it can read it or not."""
    named, mentioned = left_over(store, 0), left_over(store, 1)
    body = {"kept": {"somewhere": {"path": named, "sha256": "0" * 64, "bytes": 1}}}
    store.objects.put("kept/manifest.json", encode_document(body, "kept"))
    store.objects.put("kept/of-later-software.json", f'{{"v": 9, "uses": ["s3://b/run/{mentioned}"]}}'.encode())

    assert find_garbage(store).pieces == ()


def test_what_no_rule_knows_is_told_of_and_never_removed(store):
    strange = [
        "iterations/00000000/rollout/notes.txt",
        "iterations/00000000/tools/000001r-5t-9b-" + "0" * 64 + ".arrow",
        "checkpoints/v00000001/hf/README.md",
        "rescored/x/00000000/part.arrow",
        "model.bin",
    ]
    for path in strange:
        store.objects.put(path, b"somebody's")

    found = remove_garbage(store)

    assert (found.pieces, sorted(found.unknown)) == ((), sorted(strange))
    assert all(store.objects.exists(path) for path in strange)


def test_a_checkpoint_that_was_never_completed_goes_once_a_newer_one_is_complete(store, tmp_path):
    half = tmp_path / "half"
    half.mkdir()
    (half / "state.pt").write_bytes(b"x")
    checkpoints = CheckpointStore(store)
    checkpoints.delete(1)
    store.set_pointer("best", {"version": 2, "value": 1.0, "key": "k"})
    checkpoints.add_files(1, half)
    checkpoints.add_files(3, half)

    found = remove_garbage(store)

    assert [(piece.path, piece.rule) for piece in found.pieces] == [("checkpoints/v00000001/state.pt", "checkpoint")]
    assert list(found.waiting) == ["checkpoints/v00000003/state.pt"]
    assert [held.version for held in checkpoints.held()] == [2, 3]
    assert verify(store).ok


def test_a_damaged_checkpoint_is_no_garbage(store):
    """Its document names its files: what is left of them may be all that is left."""
    store.objects.delete("checkpoints/v00000001/state.pt")

    assert find_garbage(store).pieces == ()


@pytest.mark.parametrize("path", ["iterations/00000000/rollout.json", "iterations/00000001/rounds/00.json", "run.json"])
def test_nothing_goes_where_a_document_cannot_be_read(store, path):
    left = left_over(store)
    flip(store, path)

    with pytest.raises(StorageError, match=rf"nothing of .* is removed: .*{path} is"):
        remove_garbage(store)

    assert store.objects.exists(left)
    assert find_garbage(store).doubts


def test_nothing_goes_where_newer_software_wrote(store):
    left = left_over(store)
    body = {"schema_version": 99, "checksum": "", "iteration": 2}
    store.objects.put("iterations/00000002/rollout.json", encode_document(body, "x").replace(b'on":1', b'on":9'))

    with pytest.raises(StorageError, match=r"rollout\.json is"):
        remove_garbage(store)
    assert store.objects.exists(left)


def test_nothing_goes_where_a_manifest_vanishes_meanwhile(store, monkeypatch):
    """What it named is not garbage for that."""
    path, sizes = "iterations/00000000/rollout.json", ObjectStore.sizes

    def listing(self, prefix=""):
        found = sizes(self, prefix)
        if prefix == "":
            self.delete(path)
        return found

    monkeypatch.setattr(ObjectStore, "sizes", listing)
    parts = [part.path for part in store.stage(0, Stage.ROLLOUT)[0].parts]

    with pytest.raises(StorageError, match=r"rollout\.json vanished while it was looked at"):
        remove_garbage(store)
    assert all(store.objects.exists(part) for part in parts)


def test_nothing_goes_without_run_json(tmp_path):
    store = RunStore("none", str(tmp_path))
    left = left_over(store)

    with pytest.raises(StorageError, match=r"it has no run\.json"):
        remove_garbage(store)
    assert store.objects.exists(left)


def test_a_run_that_is_being_written_is_left_alone(store):
    left = left_over(store)
    lease = acquire(store, LeaseOwner.of_this_process(), 60)

    with pytest.raises(LeaseError, match=f"is held by process {os.getpid()}"):
        remove_garbage(store)
    assert store.objects.exists(left)
    assert [piece.path for piece in find_garbage(store).pieces] == [left]

    lease.release()
    remove_garbage(store)
    assert not store.objects.exists(left)


def test_the_lease_is_free_again_whatever_happened(store, monkeypatch):
    left_over(store)

    def failing(*arguments):
        raise StorageError("the disk is gone")

    monkeypatch.setattr(garbage, "_remove", failing)
    with pytest.raises(StorageError, match="the disk is gone"):
        remove_garbage(store)

    acquire(store, LeaseOwner.of_this_process(), 60)


def test_the_lease_is_renewed_while_it_goes_on_and_its_loss_stops_it(store, monkeypatch):
    parts = sorted(store.publish_trajectories(0, [trajectory(f"dead-{number}")]).path for number in range(3))
    monkeypatch.setattr(garbage, "BATCH", 1)
    monkeypatch.setattr(garbage, "LEASE_SECONDS", 0.2)

    def slow(done, total):
        time.sleep(0.25)
        acquire(store, LeaseOwner.of_this_process(), 60)

    with pytest.raises(LeaseError, match="stop writing"):
        remove_garbage(store, progress=slow)

    assert [store.objects.exists(path) for path in parts] == [False, True, True]


def test_what_a_dead_writer_left_half_written_goes_after_an_hour(tmp_path):
    store = RunStore("run", str(tmp_path / "runs"))
    write_run(store, tmp_path / "local")
    folder = tmp_path / "runs" / "run" / "iterations" / "00000000"
    old, new = folder / ".writing-old", folder / ".writing-new"
    probes = [store.objects.local_path(f".probe/{uuid.uuid4().hex}") for _ in range(2)]
    probes[0].parent.mkdir()
    for path in (old, new, *probes):
        path.write_bytes(b"half")
    for path in (old, probes[0]):
        os.utime(path, (time.time() - 4000,) * 2)

    found = remove_garbage(store)

    assert sorted(piece.rule for piece in found.pieces) == ["half written", "probe"]
    assert [path.exists() for path in (old, new, *probes)] == [False, True, False, True]


def test_case_10_stale_rows_of_an_iteration_that_was_made_again(store):
    """They are trained by nobody: the manifest names the rows of the attempt that counts."""
    stale = left_over(store, 1)
    named = [part_body(part)["path"] for part in store.stage(1, Stage.ROLLOUT)[0].parts]

    (piece,) = find_garbage(store).pieces

    assert piece.path == stale
    assert piece.reason == "stage rollout of iteration 1 is complete without it"
    assert stale not in named


def test_on_a_real_s3_server_with_an_upload_that_was_cut_off(s3, tmp_path):
    store = RunStore("run", f"s3://{s3.bucket}/{tmp_path.name}")
    write_run(store, tmp_path / "local")
    before, left = content(store), left_over(store)
    key = f"{tmp_path.name}/run/checkpoints/v00000009/state.pt"
    s3.client().create_multipart_upload(Bucket=s3.bucket, Key=key)

    young, old = find_garbage(store), find_garbage(store, older_than=-1)
    removed = remove_garbage(store)

    assert [piece.path for piece in young.pieces] == [left] == [piece.path for piece in removed.pieces]
    assert [(piece.rule, piece.path.partition("?")[0]) for piece in old.pieces] == [
        ("part", left),
        ("half written", "checkpoints/v00000009/state.pt"),
    ]
    assert content(store) == before
    assert verify(store).ok
    flip(store, "checkpoints/v00000002/state.pt")
    assert [fault.path for fault in verify(store).faults] == ["checkpoints/v00000002/state.pt"]
