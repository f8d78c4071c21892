import asyncio
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlhf_core.errors import ConfigError, ConflictError, StorageError
from rlhf_core.storage import ObjectStore


def test_an_object_is_read_back(objects):
    objects.put("a/b.bin", b"\x00data")

    assert objects.read("a/b.bin") == b"\x00data"
    assert objects.size("a/b.bin") == 5
    assert objects.exists("a/b.bin")


def test_an_empty_object_is_read_back(objects):
    objects.put_once("empty", b"")

    assert objects.read("empty") == b""


def test_put_replaces(objects):
    objects.put("pointer", b"old and longer")
    objects.put("pointer", b"new")

    assert objects.read("pointer") == b"new"


def test_a_folder_is_no_object(objects):
    objects.put("a/b", b"x")

    assert not objects.exists("a")


@pytest.mark.parametrize("act", ["read", "size"])
def test_an_absent_object_is_file_not_found_and_named(objects, act):
    with pytest.raises(FileNotFoundError, match=f"{act} .*no/such.*: no such object"):
        getattr(objects, act)("no/such")


def test_listing_is_recursive_relative_and_sorted(objects):
    for path in ("b/2", "b/1/x", "a", "bb"):
        objects.put(path, b"12")

    assert objects.list() == ["a", "b/1/x", "b/2", "bb"]
    assert objects.list("b") == ["b/1/x", "b/2"]
    assert objects.children("b") == ["1", "2"]
    assert objects.sizes("b/1") == {"b/1/x": 2}


def test_what_is_deleted_while_it_is_listed_is_left_out(tmp_path, monkeypatch):
    """As generations of a lease are, and files of a checkpoint that is rotated away."""
    objects = ObjectStore(str(tmp_path))
    objects.put("lease/1", b"x")
    objects.put("lease/2", b"x")
    walk = os.walk

    def walk_while_another_deletes(folder):
        for found in walk(folder):
            if "1" in found[2]:
                (tmp_path / "lease/1").unlink()
            yield found

    monkeypatch.setattr("rlhf_core.storage.backends.local.os.walk", walk_while_another_deletes)

    assert objects.list() == ["lease/2"]


def test_listing_an_absent_folder_is_empty(objects):
    assert objects.list("nothing") == []
    assert objects.children("nothing") == []


def test_put_once_refuses_other_contents_and_keeps_the_first(objects):
    objects.put_once("manifest.json", b"first")

    with pytest.raises(ConflictError, match=r"manifest\.json exists already"):
        objects.put_once("manifest.json", b"second")
    assert objects.read("manifest.json") == b"first"


def test_put_once_of_the_same_contents_is_done_already(objects):
    objects.put_once("manifest.json", b"same")
    objects.put_once("manifest.json", b"same")

    assert objects.list() == ["manifest.json"]


def test_of_sixteen_racing_creators_exactly_one_wins(objects):
    def create(i):
        try:
            objects.put_once("race", f"writer {i}".encode())
        except ConflictError:
            return None
        return i

    with ThreadPoolExecutor(16) as pool:
        winners = [i for i in pool.map(create, range(16)) if i is not None]

    assert len(winners) == 1
    assert objects.read("race") == f"writer {winners[0]}".encode()


def test_delete_is_idempotent(objects):
    objects.put("a", b"x")
    objects.delete("a")
    objects.delete("a")

    assert not objects.exists("a")


def test_files_go_in_and_out(objects, tmp_path):
    (tmp_path / "in").write_bytes(b"weights" * 1000)

    objects.put_file(tmp_path / "in", "c/weights")
    objects.get_file("c/weights", tmp_path / "deep" / "out")

    assert (tmp_path / "deep" / "out").read_bytes() == b"weights" * 1000


def test_an_absent_file_leaves_no_local_file(objects, tmp_path):
    with pytest.raises(FileNotFoundError, match="no such object"):
        objects.get_file("nothing", tmp_path / "out" / "file")

    assert list((tmp_path / "out").iterdir()) == []


def test_local_path_only_where_there_is_one(tmp_path):
    assert ObjectStore(str(tmp_path)).local_path("a/b") == tmp_path / "a" / "b"
    assert ObjectStore("memory://x").local_path("a/b") is None


def test_a_linked_file_is_not_written_twice(tmp_path):
    (tmp_path / "staging").write_bytes(b"weights")
    objects = ObjectStore(str(tmp_path / "store"))

    objects.put_file(tmp_path / "staging", "weights", link=True)

    assert objects.local_path("weights").samefile(tmp_path / "staging")


def test_an_unlinked_file_is_independent_of_its_source(tmp_path):
    (tmp_path / "staging").write_bytes(b"weights")
    objects = ObjectStore(str(tmp_path / "store"))
    objects.put_file(tmp_path / "staging", "weights")

    (tmp_path / "staging").write_bytes(b"altered")

    assert objects.read("weights") == b"weights"


def test_a_linked_copy_shares_its_blocks_and_outlives_the_object(tmp_path):
    objects = ObjectStore(str(tmp_path / "store"))
    objects.put("weights", b"weights")

    objects.get_file("weights", tmp_path / "cache" / "linked", link=True)
    objects.get_file("weights", tmp_path / "cache" / "copied")
    shared = [(tmp_path / "cache" / name).samefile(tmp_path / "store" / "weights") for name in ("linked", "copied")]
    objects.delete("weights")

    assert shared == [True, False]
    assert (tmp_path / "cache" / "linked").read_bytes() == b"weights"


def test_a_copy_from_another_disk_is_a_copy(objects, tmp_path, monkeypatch):
    def another_disk(source, target):
        raise OSError(18, "Invalid cross-device link")

    objects.put("weights", b"weights")
    monkeypatch.setattr(os, "link", another_disk)

    objects.get_file("weights", tmp_path / "copied", link=True)

    assert (tmp_path / "copied").read_bytes() == b"weights"


def test_a_folder_is_removed_with_all_that_is_in_it(objects):
    for path in ("a/b/c", "a/d", "ab"):
        objects.put(path, b"x")

    objects.remove_folder("a")
    objects.remove_folder("a")

    assert objects.list() == ["ab"]
    assert objects.children() == ["ab"]


@pytest.mark.parametrize("path", ["../outside", "/absolute", "a/../../b", "", ".", "a\\b", "a\0b"])
def test_a_path_cannot_leave_the_store(objects, path):
    with pytest.raises(StorageError, match="leaves its store"):
        objects.put(path, b"x")


def test_a_half_written_file_of_a_killed_writer_is_not_listed(tmp_path):
    objects = ObjectStore(str(tmp_path))
    objects.put("a/whole", b"x")
    (tmp_path / "a" / ".writing-0123").write_bytes(b"hal")

    assert objects.list() == ["a/whole"]
    assert objects.children("a") == ["whole"]


def test_a_plain_folder_becomes_an_absolute_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert ObjectStore("runs/x").root == f"file://{tmp_path}/runs/x"
    assert ObjectStore("file://runs/").root == f"file://{tmp_path}/runs"


def test_a_store_pickles_and_hides_its_options():
    store = ObjectStore("memory://pickled", {"secret": "hunter2"}, 3)

    assert pickle.loads(pickle.dumps(store)) == store
    assert "hunter2" not in repr(store)


async def test_a_store_serves_asyncio_through_threads(objects):
    await asyncio.gather(*(asyncio.to_thread(objects.put, f"o/{i}", b"x") for i in range(20)))

    assert len(objects.list("o")) == 20


@pytest.mark.parametrize("root", ["nosuch://bucket", "simplecache::s3://bucket"])
def test_a_root_that_cannot_be_used_is_refused_at_once(root):
    with pytest.raises(ConfigError, match="storage root"):
        ObjectStore(root)


def test_probe_accepts_a_store_with_conditional_creates_and_leaves_nothing(objects):
    objects.probe()

    assert objects.list() == []


@pytest.mark.parametrize(("act", "publish"), [("put", "replace"), ("put_once", "link")])
def test_an_object_is_on_disk_before_it_is_visible_and_its_name_after(tmp_path, monkeypatch, act, publish):
    objects, acts, real = ObjectStore(str(tmp_path)), [], getattr(os, publish)
    monkeypatch.setattr(os, "fsync", lambda descriptor: acts.append(Path(f"/proc/self/fd/{descriptor}").resolve()))
    monkeypatch.setattr(os, publish, lambda *names: (acts.append(publish), real(*names)))

    getattr(objects, act)("a", b"x")

    assert [acts[0].name.startswith(".writing-"), *acts[1:]] == [True, publish, tmp_path]
