"""What is particular to a bucket: long listings, large objects, uploads that were never completed, credentials."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fault_proxy import FaultProxy, answer
from s3_server import ACCESS_KEY, READ_KEY, READ_SECRET, SECRET_KEY

from rlhf_core.errors import ConfigError, StorageError
from rlhf_core.storage import ObjectStore, RunStore

MIB = 2**20

# Sends and fetches a file, and says by how many MiB its memory was larger meanwhile.
LARGE = """
import sys
from pathlib import Path
from rlhf_core.storage import ObjectStore
from rlhf_core.storage.backends import s3 as s3_backend
s3_backend.PART_BYTES, s3_backend.STREAMS = 5 * 2**20, 2
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) // 1024
store, file = ObjectStore(sys.argv[1]), Path(sys.argv[2])
store.put("warm", b"x" * 2**20)
before = peak()
store.put_file(file, "file")
store.get_file("file", file.with_name("back"))
print(peak() - before)
"""

UPLOADER = """
import sys
from rlhf_core.storage import ObjectStore
from rlhf_core.storage.backends import s3 as s3_backend
s3_backend.PART_BYTES = 5 * 2**20
ObjectStore(sys.argv[1]).put("shard", bytes(100 * 2**20))
"""


@pytest.fixture
def root(s3, tmp_path):
    return f"s3://{s3.bucket}/{tmp_path.name}"


@pytest.fixture
def store(root):
    return ObjectStore(root)


def python(code, *arguments):
    path = str(Path(__file__).parents[3])
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True)


def test_a_listing_of_more_than_a_page_is_whole(root, monkeypatch):
    monkeypatch.setattr("rlhf_core.storage.backends.s3.LARGEST_BULK", 100)
    store = ObjectStore(root, {"s3_additional_kwargs": {"MaxKeys": 100}})  # a page; S3's own has 1000
    names = [f"many/{number:04d}" for number in range(250)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.put(name, b"x"), names))

    assert store.list("many") == names
    assert len(store.children("many")) == 250

    store.remove_folder("many")

    assert store.list() == store.children() == []


def test_names_of_all_kinds_come_back(store):
    names = ["plain", "sp ace", "plus+", "per%20cent", "ünï/cødé", "quo'te\"", "a&b=c", "#?"]
    for name in names:
        store.put(name, name.encode())

    assert store.list() == sorted(names)
    assert [store.read(name).decode() for name in names] == names


def test_a_large_file_is_streamed_in_parts(store, root, tmp_path):
    file = tmp_path / "file"
    with file.open("wb") as out:
        for _ in range(80):
            out.write(os.urandom(MIB))

    process = python(LARGE, root, file)
    grown, _ = process.communicate(timeout=120)

    assert process.returncode == 0
    assert subprocess.run(["cmp", file, file.with_name("back")], check=False).returncode == 0
    assert int(grown) < 70
    assert store.size("file") == 80 * MIB


def test_an_upload_of_a_killed_writer_is_no_object_and_can_be_swept(store, root):
    """Found with its bytes and its age; a removed folder takes those below it along."""
    writer = python(UPLOADER, root)
    while not store.half_written(0):
        assert writer.poll() is None
        time.sleep(0.01)
    writer.send_signal(signal.SIGKILL)
    writer.wait()

    assert store.list() == []
    assert store.half_written(older_than=60) == {}
    ((name, size),) = store.half_written(0).items()
    assert name.startswith("shard?uploadId=")
    assert size % (5 * MIB) == 0
    store.discard(name)
    store.discard(name)
    assert store.half_written(0) == {}


def test_a_removed_folder_takes_half_written_objects_along(s3, store, root):
    client, folder = s3.client(), root.removeprefix(f"s3://{s3.bucket}/")
    for name in ("gone/a", "kept/b"):
        client.create_multipart_upload(Bucket=s3.bucket, Key=f"{folder}/{name}")

    store.remove_folder("gone")

    assert [name.partition("?")[0] for name in store.half_written(0)] == ["kept/b"]


def test_a_bucket_that_is_not_there_is_named_with_its_server(s3):
    store = ObjectStore("s3://no-such-bucket/runs")
    told = (
        rf"there is no bucket no-such-bucket at {s3.endpoint}: create it, or correct storage.root or AWS_ENDPOINT_URL"
    )

    for act in (store.probe, store.list, lambda: store.read("run.json")):
        with pytest.raises(StorageError, match=told):
            act()


@pytest.mark.parametrize("root", ["s3://", "s3:///runs", "s3a://"])
def test_a_root_without_a_bucket_is_refused(root):
    with pytest.raises(ConfigError, match="names no bucket"):
        ObjectStore(root)


# --- credentials


@pytest.fixture
def profile(tmp_path, monkeypatch):
    """Write a profile of the usual AWS files: what its credential_process prints is a list, one answer a call."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))

    def write(*answers):
        script = (
            "import pathlib, sys\n"
            f"answers, calls = {answers!r}, pathlib.Path({str(tmp_path / 'calls')!r})\n"
            "calls.open('a').write('x')\n"
            "print(answers[min(len(calls.read_text()), len(answers)) - 1])\n"
        )
        (tmp_path / "process.py").write_text(script)
        command = f"{sys.executable} {tmp_path / 'process.py'}"
        (tmp_path / "config").write_text(f"[profile {tmp_path.name}]\ncredential_process = {command}\n")
        return tmp_path.name

    return write


def credentials(key, secret, seconds):
    expires = datetime.now(UTC) + timedelta(seconds=seconds)
    return json.dumps({"Version": 1, "AccessKeyId": key, "SecretAccessKey": secret, "Expiration": expires.isoformat()})


def test_credentials_are_renewed_before_they_expire(root, profile, tmp_path):
    """The first may only read; a process that lives on gets the next ones, which may write."""
    name = profile(credentials(READ_KEY, READ_SECRET, 30), credentials(ACCESS_KEY, SECRET_KEY, 3600))
    store = ObjectStore(root, {"profile": name})

    assert store.list() == []
    store.put("a", b"x")
    store.put("b", b"y")

    assert store.list() == ["a", "b"]
    assert (tmp_path / "calls").read_text() == "xx"


def test_credentials_that_the_store_calls_expired_are_asked_for_again(s3, root, profile, tmp_path):
    """Such as those of a file that a login has written anew."""
    name = profile(credentials(ACCESS_KEY, SECRET_KEY, 3600))
    with FaultProxy(s3.endpoint) as proxy:
        store = ObjectStore(root, {"profile": name, "endpoint_url": proxy.endpoint})
        proxy.add(answer(400, "ExpiredToken"), times=1)

        store.put("a", b"x")

        assert (tmp_path / "calls").read_text() == "xx"
        proxy.add(answer(400, "ExpiredToken"))
        with pytest.raises(StorageError, match="renew the credentials, or use a source that renews them"):
            store.put("a", b"y")


def test_without_credentials_the_error_says_where_they_are_looked_for(root, profile):
    profile()

    with pytest.raises(StorageError, match=r"give this process credentials: in its environment \(AWS_ACCESS_KEY_ID"):
        ObjectStore(root, {"client_kwargs": {"region_name": "eu-west-1"}}).put("a", b"x")


def test_a_key_that_may_only_read_reads_and_is_refused_at_the_start_of_a_run(s3, root, monkeypatch):
    RunStore("run", root).write_run({"config": {}})
    for name, value in s3.reader_environment.items():
        monkeypatch.setenv(name, value)
    reader = RunStore("run", root, {"client_kwargs": {"region_name": "eu-west-2"}})

    assert reader.read_run() == {"config": {}}
    with pytest.raises(StorageError, match=r"check the credentials .* allowed to do in bucket runs at http") as failed:
        reader.objects.probe()
    assert READ_SECRET not in f"{failed.value}{failed.value.__cause__!r}"
