"""What a store does when its disk or its server does not."""

import os
import subprocess
import time

import pytest

from rlhf_core.errors import ConflictError, StorageError
from rlhf_core.storage import CheckpointStore, ObjectStore, RunStore


@pytest.fixture
def tiny_disk(tmp_path):
    """A disk of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a small disk")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("act", ["put", "put_once"])
def test_a_full_disk_leaves_nothing_half_visible_and_says_so(tiny_disk, act):
    objects = ObjectStore(str(tiny_disk))
    objects.put("kept", b"k" * 1000)

    with pytest.raises(StorageError, match=rf"{act} file://.*/big failed: the disk is full"):
        getattr(objects, act)("big", b"x" * 10**6)
    assert objects.list() == ["kept"]
    assert list(tiny_disk.iterdir()) == [tiny_disk / "kept"]


def test_a_full_disk_keeps_the_old_pointer(tiny_disk):
    objects = ObjectStore(str(tiny_disk))
    objects.put("latest.json", b"old")

    with pytest.raises(StorageError, match="the disk is full"):
        objects.put("latest.json", b"x" * 10**6)
    assert objects.read("latest.json") == b"old"


def test_a_file_for_a_full_disk_leaves_nothing_half_visible(tiny_disk, tmp_path):
    (tmp_path / "weights").write_bytes(b"x" * 10**6)

    with pytest.raises(StorageError, match=r"put_file .*/model/weights failed: the disk is full"):
        ObjectStore(str(tiny_disk)).put_file(tmp_path / "weights", "model/weights", link=True)
    assert ObjectStore(str(tiny_disk)).list() == []


def test_a_full_disk_without_mounting(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(StorageError, match="the disk is full"):
        ObjectStore(str(tmp_path)).put_once("a", b"x")
    assert list(tmp_path.iterdir()) == []


def test_a_passing_error_is_tried_again(scripted):
    scripted.failures = [ConnectionResetError("reset"), OSError("503 SlowDown")]
    objects = ObjectStore("scripted://bucket", timeout=5)

    objects.put("a", b"x")

    assert scripted.calls == 3
    assert objects.read("a") == b"x"


def test_a_refusal_is_not_tried_again(scripted):
    scripted.failures = [PermissionError("AccessDenied")]

    with pytest.raises(StorageError, match=r"put scripted://bucket/a failed: .*AccessDenied; check the credentials"):
        ObjectStore("scripted://bucket", timeout=5).put("a", b"x")
    assert scripted.calls == 1


def test_a_lasting_error_ends_within_the_limit(scripted):
    scripted.failures = [ConnectionResetError("reset")] * 100
    began = time.monotonic()

    with pytest.raises(StorageError, match=r"put scripted://bucket/a failed within 0\.5 s .*reset"):
        ObjectStore("scripted://bucket", timeout=0.5).put("a", b"x")
    assert time.monotonic() - began < 1.0


def test_case_120_a_stalled_upload_fails_within_its_limit_and_names_rank_and_key(scripted, tmp_path):
    """The previous checkpoint stays the newest."""
    checkpoints = CheckpointStore(RunStore("run", "scripted://bucket", timeout=0.6))
    (tmp_path / "weights").write_bytes(b"w")
    checkpoints.commit(1, {}, checkpoints.add_files(1, tmp_path, "rank3"))
    scripted.stalled = "v00000002"
    began = time.monotonic()

    with pytest.raises(
        StorageError, match=r"put_file scripted://bucket/run/checkpoints/v00000002/rank3/weights failed"
    ):
        checkpoints.add_files(2, tmp_path, "rank3")
    assert time.monotonic() - began < 2.0
    assert checkpoints.newest()[0] == 1


def test_a_create_whose_answer_was_lost_is_ours(scripted):
    scripted.loses_answer = True
    objects = ObjectStore("scripted://bucket", timeout=5)

    objects.put_once("manifest", b"ours")

    assert objects.read("manifest") == b"ours"


def test_a_create_by_another_writer_is_a_conflict(scripted):
    objects = ObjectStore("scripted://bucket", timeout=5)
    objects.put_once("manifest", b"theirs")

    with pytest.raises(ConflictError):
        objects.put_once("manifest", b"ours")


def test_probe_refuses_a_store_that_ignores_conditional_creates(scripted):
    scripted.ignores_create = True
    objects = ObjectStore("scripted://bucket", timeout=5)

    with pytest.raises(StorageError, match=r"scripted://bucket ignores conditional creates.*Use a store"):
        objects.probe()
    assert objects.list() == []


def test_a_create_too_large_for_one_conditional_put_is_refused(scripted, monkeypatch):
    monkeypatch.setattr("rlhf_core.storage.backends.remote.LARGEST_CREATE", 10)

    with pytest.raises(StorageError, match="11 bytes are more than one conditional PUT carries"):
        ObjectStore("scripted://bucket").put_once("manifest", b"x" * 11)


def test_a_large_object_is_downloaded_in_ranges(scripted, monkeypatch, tmp_path):
    monkeypatch.setattr("rlhf_core.storage.backends.remote.DOWNLOAD_CHUNK", 4)
    objects = ObjectStore("scripted://bucket", timeout=5)
    objects.put("a", b"0123456789")
    scripted.calls = 0

    objects.get_file("a", tmp_path / "a")

    assert (tmp_path / "a").read_bytes() == b"0123456789"
    assert scripted.calls == 3
