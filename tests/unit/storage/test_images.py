"""The images of a run: written once, read as they were written, found missing or damaged, and never garbage while shown."""

import hashlib
import os
import time

import pytest
from storage_samples import manifest, trajectory
from whole_run import flip, write_run

from rlhf_core.errors import CorruptShardError, StorageError
from rlhf_core.records import ImageRef, Stage
from rlhf_core.storage import RunStore, adopt_parts
from rlhf_core.storage.audit.garbage import find_garbage, remove_garbage
from rlhf_core.storage.audit.verification import verify

pytestmark = pytest.mark.agents

RED, BLUE = b"\x89PNG red", b"\x89PNG blue"  # storage does not look into them
ITERATION = 9


@pytest.fixture(params=["file", "memory"])
def store(request, tmp_path):
    root = str(tmp_path / "runs") if request.param == "file" else f"memory://{tmp_path.name}"
    run = RunStore("run", root)
    write_run(run, tmp_path / "local")
    return run


def shows(store, *images, group="g0"):
    """A published row that shows images, and their paths."""
    uris = [store.put_image(image) for image in images]
    refs = tuple(ImageRef("ab" * 32, uri, place, place + 1) for place, uri in enumerate(uris))
    return store.publish_trajectories(ITERATION, [trajectory(group, images=refs)]), uris


def test_an_image_is_written_once_under_the_sha256_of_its_bytes(store):
    uri = store.put_image(RED)
    again = store.put_image(RED)

    assert uri == again == f"images/{hashlib.sha256(RED).hexdigest()}.png"
    assert store.get_image(uri) == RED
    assert store.objects.list("images") == [uri]


def test_a_damaged_image_is_an_error_that_names_it(store):
    uri = store.put_image(RED)
    flip(store, uri, 0)

    with pytest.raises(CorruptShardError, match=f"{uri} is damaged"):
        store.get_image(uri)


def test_a_damaged_image_is_written_again(store):
    uri = store.put_image(RED)
    flip(store, uri, 0)

    store.put_image(RED)

    assert store.get_image(uri) == RED


@pytest.mark.parametrize("uri", [f"images/{'0' * 64}.png", "run.json", "images/x.png"])
def test_what_is_no_image_of_the_run_is_an_error_that_names_it(store, uri):
    with pytest.raises(CorruptShardError, match=uri):
        store.get_image(uri)


def test_an_image_that_is_gone_or_altered_is_a_fault_named_by_the_shard(store):
    part, (red, blue) = shows(store, RED, BLUE)
    store.commit(manifest([part], iteration=ITERATION))
    assert verify(store).ok
    store.objects.delete(red)
    flip(store, blue, 0)

    faults = {fault.path: (fault.kind, fault.named_by) for fault in verify(store).faults}

    assert faults == {red: ("missing", part.path), blue: ("altered", part.path)}


def test_all_images_gone_is_a_fault_of_a_run_that_may_see_them(tmp_path):
    store = RunStore("run", str(tmp_path))
    store.write_run({"run_id": "run", "config": {"data": {"max_images_per_prompt": 1}}})
    part, (red,) = shows(store, RED)
    store.commit(manifest([part], iteration=ITERATION))
    store.objects.delete(red)

    (fault,) = verify(store).faults

    assert (fault.path, fault.kind) == (red, "missing")


def test_a_damaged_shard_is_the_only_fault(store):
    part, _ = shows(store, RED)
    store.commit(manifest([part], iteration=ITERATION))
    flip(store, part.path)

    (fault,) = verify(store).faults

    assert fault.path == part.path


def test_only_the_images_of_a_version_are_looked_at(store):
    part, (red,) = shows(store, RED)
    store.commit(manifest([part], iteration=ITERATION))
    store.objects.delete(red)

    assert verify(store, version=1).ok
    assert not verify(store, version=ITERATION + 1).ok


def aged(store, path):
    """Written two hours ago."""
    local = store.objects.local_path(path)
    os.utime(local, (time.time() - 7200,) * 2)


def test_only_an_image_that_no_row_shows_goes_after_an_hour(tmp_path):
    """Shown by a row that a manifest names; by one that waits for it; by none, old; by none, new."""
    store = RunStore("run", str(tmp_path))
    write_run(store, tmp_path / "local")
    named, (red,) = shows(store, RED)
    store.commit(manifest([named], iteration=ITERATION))
    _, (blue,) = shows(store, BLUE, group="waits")
    old, new = store.put_image(b"old"), store.put_image(b"new")
    for path in (red, blue, old):
        aged(store, path)

    removed = remove_garbage(store)

    assert [(piece.path, piece.rule) for piece in removed.pieces] == [(old, "image")]
    assert store.objects.list("images") == sorted([red, blue, new])


def test_nothing_goes_where_a_shard_cannot_be_asked(tmp_path):
    store = RunStore("run", str(tmp_path))
    write_run(store, tmp_path / "local")
    part, _ = shows(store, RED)
    flip(store, part.path)

    assert any(part.path in doubt for doubt in find_garbage(store).doubts)
    with pytest.raises(StorageError, match="nothing of .* is removed"):
        remove_garbage(store)


@pytest.mark.parametrize("target", ["file", "memory"])
def test_a_replay_takes_the_images_of_its_source_along(store, tmp_path, target):
    replay = RunStore("replay", str(tmp_path / "replays") if target == "file" else f"memory://{tmp_path.name}-replays")
    part, uris = shows(store, RED, BLUE)

    [adopted] = adopt_parts(replay, store, [part], 0, Stage.ROLLOUT)

    [row] = replay.read_trajectories([adopted])
    assert [replay.get_image(image.uri) for image in row.images] == [RED, BLUE]
    assert [image.uri for image in row.images] == uris


def test_an_image_that_is_damaged_in_the_source_is_not_taken_over(store, tmp_path):
    part, (red,) = shows(store, RED)
    flip(store, red, 0)

    with pytest.raises(CorruptShardError, match=f"{red} is damaged"):
        adopt_parts(RunStore("replay", str(tmp_path / "replays")), store, [part], 0, Stage.ROLLOUT)
