"""Which checkpoints stay, and what a deletion that is broken off leaves.

Each checkpoint of these tests is 1000 bytes of files and a checkpoint.json of a few hundred.
"""

import logging
import os
import signal

import pytest

from rlhf_core.storage import CheckpointStore, Held, Keep, ObjectStore, rotate, surplus


@pytest.fixture
def checkpoints(run_store):
    return CheckpointStore(run_store)


@pytest.fixture
def state(tmp_path):
    folder = tmp_path / "state"
    (folder / "deep").mkdir(parents=True)
    (folder / "a").write_bytes(b"a" * 900)
    (folder / "deep" / "b").write_bytes(b"b" * 100)
    return folder


@pytest.fixture
def save(checkpoints, state):
    """Complete checkpoints of these versions."""

    def make(*versions):
        for version in versions:
            checkpoints.commit(version, {"cursor": version}, checkpoints.add_files(version, state, "model"))

    return make


def whole(*versions, bytes=10):
    return [Held(version, bytes, complete=True) for version in versions]


@pytest.mark.parametrize(
    ("keep", "best", "gone"),
    [
        (Keep(max_num=9), None, []),
        (Keep(max_num=2), None, [1, 2, 3]),
        (Keep(max_num=1), None, [1, 2, 3, 4]),
        (Keep(max_num=2), 1, [2, 3]),  # the best one besides
        (Keep(max_num=2), 4, [1, 2, 3]),  # the best one among them
        (Keep(max_num=1), 5, [1, 2, 3, 4]),
        (Keep(max_bytes=50), None, []),
        (Keep(max_bytes=49), None, [1]),
        (Keep(max_bytes=30), None, [1, 2]),
        (Keep(max_bytes=30), 1, [2, 3]),  # 5 and 1 hold 20: one more fits
        (Keep(max_bytes=20), 1, [2, 3, 4]),
        (Keep(max_bytes=1), 1, [2, 3, 4]),  # the newest and the best stay in any case
        (Keep(max_num=2, max_bytes=45), None, [1, 2, 3]),
        (Keep(max_num=4, max_bytes=25), None, [1, 2, 3]),
    ],
)
def test_what_goes_of_five_checkpoints_of_ten_bytes(keep, best, gone):
    assert surplus(whole(1, 2, 3, 4, 5), keep, best) == gone


def test_an_old_one_that_would_fit_does_not_stay_in_place_of_a_newer_one():
    """Sizes 1, 30, 10, 10; 25 bytes: after 3 and 4 comes 2, which does not fit, and 1 is older than that."""
    held = [Held(v, size, complete=True) for v, size in ((1, 1), (2, 30), (3, 10), (4, 10))]

    assert surplus(held, Keep(max_bytes=25)) == [1, 2]


def test_what_is_broken_goes_only_below_the_newest_complete_one():
    """2 is the leftover of a deletion; 6 may be a save under way."""
    held = [*whole(1), Held(2, 5, complete=False), *whole(4), Held(6, 5, complete=False)]

    assert surplus(held, Keep(max_num=9)) == [2]


def test_what_is_broken_does_not_count():
    held = [*whole(1, 2), Held(3, 10, complete=False), *whole(4)]

    assert surplus(held, Keep(max_num=3)) == [3]
    assert surplus(held, Keep(max_bytes=30)) == [3]


def test_without_a_complete_one_nothing_goes():
    assert surplus([Held(1, 5, complete=False), Held(2, 5, complete=False)], Keep(max_num=1)) == []


def test_rotation_deletes_the_oldest_and_leaves_no_trace_of_them(checkpoints, save, tmp_path):
    save(1, 2, 3)

    gone = rotate(checkpoints, Keep(max_num=2))

    assert gone == [1]
    assert checkpoints.versions() == [2, 3]
    assert [held.version for held in checkpoints.held()] == [2, 3]
    checkpoints.download(2, tmp_path / "back", "model")


def test_a_folder_is_gone_with_its_checkpoint(local_run, state, tmp_path):
    """And with what a writer that died left half written in it."""
    checkpoints = CheckpointStore(local_run)
    for version in (1, 2):
        checkpoints.commit(version, {}, checkpoints.add_files(version, state))
    (tmp_path / "runs/run/checkpoints/v00000001/deep/.writing-0123").write_bytes(b"x" * 100)

    rotate(checkpoints, Keep(max_num=1))

    assert [path.name for path in (tmp_path / "runs/run/checkpoints").iterdir()] == ["v00000002"]


def test_without_limits_nothing_is_deleted_not_even_leftovers(checkpoints, save, state):
    checkpoints.add_files(1, state)
    save(2, 3)

    assert rotate(checkpoints, Keep()) == []
    assert [held.version for held in checkpoints.held()] == [1, 2, 3]


def test_leftovers_of_a_crashed_save_are_cleaned_by_the_next_rotation(checkpoints, save, state):
    """1 crashed; 4 is being written."""
    checkpoints.add_files(1, state)
    save(2, 3)
    checkpoints.add_files(4, state)

    assert rotate(checkpoints, Keep(max_num=2)) == [1]
    assert [held.version for held in checkpoints.held()] == [2, 3, 4]


@pytest.mark.parametrize("harm", ["marker", "file"])
def test_the_newest_that_is_whole_stays_where_a_newer_one_is_damaged(checkpoints, save, harm):
    save(1, 2, 3)
    checkpoints.run_store.objects.delete(
        "checkpoints/v00000003/" + ("checkpoint.json" if harm == "marker" else "model/a")
    )

    rotate(checkpoints, Keep(max_num=1))

    assert checkpoints.newest()[0] == 2


def test_too_little_room_for_one_checkpoint_keeps_the_newest_and_the_best_and_says_so(checkpoints, save, caplog):
    save(1, 2, 3)

    with caplog.at_level(logging.WARNING):
        gone = rotate(checkpoints, Keep(max_bytes=500), best=1)

    assert (gone, checkpoints.versions()) == ([2], [1, 3])
    assert "which always stay, hold" in caplog.text
    assert "ckpt.max_mem" in caplog.text


def test_enough_room_is_no_warning(checkpoints, save, caplog):
    save(1, 2, 3)

    with caplog.at_level(logging.WARNING):
        rotate(checkpoints, Keep(max_bytes=10**6))

    assert caplog.text == ""


def die_before(monkeypatch, act, number):
    """This process is killed when it calls ``act`` of the object store for the ``number`` + 1st time."""
    done = []
    original = getattr(ObjectStore, act)

    def counted(*arguments):
        if len(done) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(ObjectStore, act, counted)


# Of checkpoint 1: checkpoint.json, 2 files, the folder; then the same of checkpoint 2.
DEATHS = [*(("delete", number) for number in range(6)), ("remove_folder", 0), ("remove_folder", 1)]


@pytest.mark.parametrize(("act", "number"), DEATHS)
def test_case_9_a_deletion_broken_off_anywhere_leaves_nothing_that_looks_complete(
    local_run, state, act, number, monkeypatch, tmp_path
):
    checkpoints = CheckpointStore(local_run)
    for version in (1, 2, 3):
        checkpoints.commit(version, {}, checkpoints.add_files(version, state))
    monkeypatch.setattr("rlhf_core.storage.checkpoints.TRANSFERS", 1)

    rotator = os.fork()
    if rotator == 0:
        die_before(monkeypatch, act, number)
        rotate(checkpoints, Keep(max_num=1))
        os._exit(0)
    _, status = os.waitpid(rotator, 0)

    assert os.WIFSIGNALED(status)
    for version in checkpoints.versions():
        checkpoints.download(version, tmp_path / f"back{version}")  # what has a marker has all its files
    assert checkpoints.newest()[0] == 3
    checkpoints.commit(4, {}, checkpoints.add_files(4, state))
    rotate(checkpoints, Keep(max_num=1))
    assert [path.name for path in (tmp_path / "runs/run/checkpoints").iterdir()] == ["v00000004"]


def test_a_store_that_refuses_to_delete_is_an_error(checkpoints, save, monkeypatch):
    save(1, 2)
    monkeypatch.setattr(ObjectStore, "delete", refused)

    with pytest.raises(PermissionError):
        rotate(checkpoints, Keep(max_num=1))


def refused(store, path):
    raise PermissionError(path)
