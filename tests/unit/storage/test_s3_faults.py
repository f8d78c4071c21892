"""What a store on S3 does when the network or the server does not: a real server behind a proxy that harms requests.

::

    ObjectStore ─▶ FaultProxy ─▶ SeaweedFS
"""

import logging
import threading
import time

import pytest
from fault_proxy import (
    FaultProxy,
    answer,
    delay,
    drop,
    flip_received,
    flip_sent,
    lose_answer,
    shorten,
    stall,
    truncate,
    unconditional,
)
from s3_server import ACCESS_KEY, SECRET_KEY

from rlhf_core.errors import ConflictError, CorruptShardError, StorageError
from rlhf_core.storage import CheckpointStore, ObjectStore, RunStore

MIB = 2**20


@pytest.fixture(scope="module")
def the_proxy(s3):
    with FaultProxy(s3.endpoint) as proxy:
        yield proxy


@pytest.fixture
def proxy(the_proxy):
    yield the_proxy
    the_proxy.clear()


@pytest.fixture
def options(proxy):
    return {"endpoint_url": proxy.endpoint}


@pytest.fixture
def root(s3, tmp_path):
    return f"s3://{s3.bucket}/{tmp_path.name}"


@pytest.fixture
def through(root, options):
    """The store behind the proxy."""
    return ObjectStore(root, options, timeout=10)


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of 5 MiB, which is the least that S3 takes."""
    monkeypatch.setattr("rlhf_core.storage.backends.s3.PART_BYTES", 5 * MIB)


@pytest.fixture
def fast_line(monkeypatch):
    """Limits that do not allow for the time that bytes take."""
    monkeypatch.setattr("rlhf_core.storage.backends.remote.SLOWEST_BYTES_PER_SECOND", 10**12)


@pytest.fixture
def weights(tmp_path):
    """A file of three parts."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * (12 * MIB // 256))
    return path


def requests(proxy, method, text=""):
    return [seen for seen in proxy.seen if seen[0] == method and text in seen[1]]


@pytest.mark.parametrize(
    "fault",
    [
        drop,
        lose_answer,
        flip_sent,
        answer(503, "SlowDown"),
        answer(500, "InternalError"),
        answer(429, "TooManyRequests"),
        answer(400, "RequestTimeout"),
    ],
)
def test_a_write_that_fails_in_passing_is_done_again(through, proxy, fault):
    proxy.add(fault, "PUT", times=2)

    through.put("a", b"contents")

    assert through.read("a") == b"contents"
    assert len(requests(proxy, "PUT")) == 3


@pytest.mark.parametrize("fault", [drop, truncate, shorten, answer(503, "SlowDown"), answer(500, "InternalError")])
def test_a_read_that_fails_in_passing_is_done_again(through, proxy, fault):
    through.put("a", b"contents")
    proxy.add(fault, "GET", times=2)

    assert through.read("a") == b"contents"
    assert len(requests(proxy, "GET")) == 3


@pytest.mark.parametrize("act", ["list", "size", "delete", "children"])
def test_the_other_acts_are_done_again_too(through, proxy, act):
    through.put("a/b", b"12")
    proxy.add(answer(503, "SlowDown"), times=1)
    proxy.add(drop, times=1)

    found = getattr(through, act)("a/b" if act in ("size", "delete") else "a")

    assert found == {"list": ["a/b"], "size": 2, "delete": None, "children": ["b"]}[act]


def test_a_slow_store_is_waited_for(through, proxy):
    proxy.add(delay(1.5))

    through.put("a", b"x")

    assert through.read("a") == b"x"
    assert len(proxy.seen) == 2


def test_a_create_whose_answer_was_lost_is_ours(through, proxy):
    proxy.add(lose_answer, "PUT", times=1)

    through.put_once("manifest", b"ours")

    assert through.read("manifest") == b"ours"
    assert len(requests(proxy, "PUT")) == 2


def test_a_create_whose_answer_was_lost_to_another_writer_is_a_conflict(through, proxy, root):
    ObjectStore(root).put_once("manifest", b"theirs")
    proxy.add(lose_answer, "PUT", times=1)

    with pytest.raises(ConflictError):
        through.put_once("manifest", b"ours")


def test_two_creates_at_once_are_told_to_try_again_by_some_stores(through, proxy):
    proxy.add(answer(409, "ConditionalRequestConflict"), "PUT", times=1)

    through.put_once("manifest", b"ours")

    assert len(requests(proxy, "PUT")) == 2


def test_a_store_without_conditional_writes_is_refused_at_the_start(through, proxy):
    proxy.add(unconditional(ACCESS_KEY, SECRET_KEY), "PUT")

    with pytest.raises(StorageError, match=r"ignores conditional creates \(If-None-Match: \*\).*Use a store"):
        through.probe()
    assert through.list() == []


def test_a_store_that_does_not_know_conditional_writes_is_refused_at_once(through, proxy):
    proxy.add(answer(501, "NotImplemented"), "PUT")

    with pytest.raises(StorageError, match=r"put_once .* failed: .*bucket runs at http.* lacks what the log of a run"):
        through.probe()
    assert len(proxy.seen) == 1


@pytest.mark.parametrize(
    "act",
    [
        lambda store: store.put("a", b"x"),
        lambda store: store.put_once("a", b"x"),
        lambda store: store.read("a"),
        lambda store: store.size("a"),
        lambda store: store.list(),
        lambda store: store.children(),
        lambda store: store.delete("a"),
        lambda store: store.probe(),
    ],
    ids=["put", "put_once", "read", "size", "list", "children", "delete", "probe"],
)
def test_every_act_on_a_store_that_never_answers_ends_within_its_limit(root, options, proxy, fast_line, act):
    proxy.add(stall)
    began = time.monotonic()

    with pytest.raises(
        StorageError, match=rf"{root}.* failed within 0\.6 s.*no answer from bucket runs at {proxy.endpoint}"
    ):
        act(ObjectStore(root, options, timeout=0.6))
    assert time.monotonic() - began < 5.0


def test_a_lasting_refusal_ends_within_the_limit_and_says_what_the_server_said(root, options, proxy):
    proxy.add(answer(503, "SlowDown"))

    with pytest.raises(StorageError, match=r"put .*/a failed within 5\.0 s \(\d+ attempts\): .*on purpose"):
        ObjectStore(root, options, timeout=5).put("a", b"x")


def test_a_file_in_parts_survives_a_bad_line(through, proxy, small_parts, weights, tmp_path):
    proxy.add(drop, "PUT", query="partNumber=1", times=1)
    proxy.add(flip_sent, "PUT", query="partNumber=2", times=1)
    proxy.add(lose_answer, "POST", query="uploadId", times=1)
    proxy.add(truncate, "GET", "weights", times=1)

    through.put_file(weights, "weights")
    through.get_file("weights", tmp_path / "back")

    assert (tmp_path / "back").read_bytes() == weights.read_bytes()
    assert len(requests(proxy, "PUT", "partNumber")) == 5  # only what failed is sent again
    assert through.half_written(0) == {}


def test_a_completed_upload_whose_answer_was_lost_is_sent_again_where_the_store_forgets_it(
    through, proxy, small_parts, weights
):
    """As AWS does after a while: no such upload. An older object of that name says nothing about this one."""
    proxy.add(lose_answer, "POST", query="uploadId", times=1)
    proxy.add(answer(404, "NoSuchUpload"), "POST", query="uploadId", times=1)

    through.put_file(weights, "weights")

    assert through.size("weights") == 12 * MIB
    assert len(requests(proxy, "PUT", "partNumber")) == 6


def test_an_upload_that_something_else_aborted_is_an_error(through, proxy, small_parts, weights):
    proxy.add(answer(404, "NoSuchUpload"), "POST", query="uploadId")

    with pytest.raises(StorageError, match=r"put_file .*/weights failed: its upload was aborted by something else"):
        through.put_file(weights, "weights")
    assert not through.exists("weights")
    assert through.half_written(0) == {}


def test_a_file_that_does_not_get_through_is_not_there_and_leaves_no_parts(
    root, options, proxy, small_parts, fast_line, weights
):
    patient, hasty = (ObjectStore(root, options, timeout=seconds) for seconds in (60, 1.5))
    patient.put("weights", b"old")
    proxy.add(answer(503, "SlowDown"), "PUT", query="partNumber=2")

    with pytest.raises(StorageError, match=r"put_file .*/weights failed within"):
        hasty.put_file(weights, "weights")
    assert patient.read("weights") == b"old"
    assert patient.half_written(0) == {}


def test_a_removed_folder_is_gone_where_uploads_may_not_be_listed(through, proxy, caplog):
    through.put("folder/a", b"x")
    proxy.add(answer(403, "AccessDenied"), "GET", query="uploads")

    through.remove_folder("folder")

    assert through.list() == []
    assert "uploads that were never completed are left: list uploads" in caplog.text


def test_a_bit_that_flips_on_the_way_back_is_found(root, options, proxy):
    run_store = RunStore("run", root, options)
    data = run_store.publish_rewards(1, [])
    proxy.add(flip_received, "GET")

    with pytest.raises(CorruptShardError, match=r"is damaged: its sha256 is"):
        run_store.read_rewards([data])


def test_case_120_a_stalled_save_fails_within_its_limit_names_the_key_and_leaves_the_previous_checkpoint(
    root, options, proxy, tmp_path
):
    patient, hasty = (RunStore("run", root, options, timeout=seconds) for seconds in (60, 1.5))
    checkpoints = CheckpointStore(patient)
    state = tmp_path / "state"
    state.mkdir()
    for name in ("a", "b", "c"):
        (state / name).write_bytes(b"w" * 1000)
    checkpoints.commit(1, {}, checkpoints.add_files(1, state, "rank3"))
    patient.set_pointer("latest", {"version": 1})
    proxy.add(stall, "PUT", "v00000002/rank3/b")
    began = time.monotonic()

    with pytest.raises(StorageError, match=rf"put_file {root}/run/checkpoints/v00000002/rank3/b failed within 1\.5 s"):
        CheckpointStore(hasty).add_files(2, state, "rank3")

    assert time.monotonic() - began < 5.0
    assert patient.pointer("latest") == {"version": 1}
    assert checkpoints.newest()[0] == 1


# --- the server itself


def test_a_server_that_is_suspended_for_a_moment_is_waited_for(s3, root):
    store = ObjectStore(root, timeout=20)
    s3.suspend()
    resume = threading.Timer(0.7, s3.resume)
    resume.start()

    store.put_once("a", b"x")

    resume.join()
    assert store.read("a") == b"x"


def test_a_server_that_is_suspended_and_does_not_come_back_is_given_up(s3, root):
    ObjectStore(root).put("latest", b"1")
    s3.suspend()
    began = time.monotonic()

    try:
        with pytest.raises(StorageError, match="failed within 0.9 s"):
            ObjectStore(root, timeout=0.9).put("latest", b"2")
        assert time.monotonic() - began < 5.0
    finally:
        s3.resume()


def test_a_server_that_is_killed_in_the_middle_of_a_file_and_comes_back(s3, root, small_parts, weights, tmp_path):
    """What it acknowledged before is there; the file is whole. While it is away, errors name it."""
    store = ObjectStore(root, timeout=60)
    store.put_once("manifest", b"before")
    done = []
    writer = threading.Thread(target=lambda: done.append(store.put_file(weights, "weights")))

    writer.start()
    while not store.half_written(0) and not done:
        time.sleep(0.01)
    s3.kill()
    try:
        with pytest.raises(StorageError, match=rf"list {root}/ failed within .*connect to .*{s3.endpoint}"):
            ObjectStore(root, timeout=3).list()
    finally:
        s3.restart()
    writer.join(60)

    assert done == [None]
    assert store.read("manifest") == b"before"
    store.get_file("weights", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == weights.read_bytes()


def test_nothing_is_logged_of_all_this_with_keys_in_it(through, proxy, caplog):
    caplog.set_level(logging.INFO)
    proxy.add(answer(403, "SignatureDoesNotMatch"))

    with pytest.raises(StorageError) as failed:
        through.put("a", b"x")

    told = f"{failed.value} {failed.value.__cause__!r} {through!r} {caplog.text}"
    assert SECRET_KEY not in told
