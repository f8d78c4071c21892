"""The real package wandb, in its own process: offline files read back, and servers that are away."""

import json
import socket
import struct
import time

import psutil
import pytest
from wandb.proto.wandb_internal_pb2 import Record

from rlhf_core.config.model import WandbConfig
from rlhf_core.lineage import TrackerError
from rlhf_core.lineage.wandb import tracker as module
from rlhf_core.lineage.wandb.tracker import WandbTracker

BLOCK = 32 * 1024
KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def begin(tmp_path):
    trackers = []

    def make(mode="offline"):
        tracker = WandbTracker(WandbConfig(project="tests", group="g", mode=mode), tmp_path)
        trackers.append(tracker)
        return tracker

    yield make
    for tracker in trackers:
        tracker.close()


def records(folder):
    """Everything in the files of all attempts, as wandb would upload it, oldest first."""
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    return [Record.FromString(data) for path in files for data in chunks(path.read_bytes())]


def chunks(log):
    """The records of a LevelDB log, in which wandb keeps them: pieces in blocks of 32 KiB, (crc, length, kind) before each."""
    at, whole = 7, b""  # behind the file's own header
    while at + 7 <= len(log):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", log, at)
        whole += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield whole
            whole = b""


def rows(folder):
    return [
        {
            item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        for record in records(folder)
        if record.WhichOneof("record_type") == "history"
    ]


def test_a_run_of_two_attempts_is_one_run_with_each_row_once(begin, tmp_path):
    first = begin()
    first.start("run", {"train": {"seed": 7}}, {"git.revision": "abc"})
    first.log_iteration(0, {"reward/mean": 0.25}, [], 100.0)
    first.log_evaluation(1, {"eval/pass@1": 0.5}, 110.0)
    first.finish(succeeded=False)

    again = begin()
    again.start("run", {"train": {"seed": 7}}, {})
    again.log_evaluation(1, {"eval/pass@1": 0.5}, 110.0)
    told = again.logged_iterations()
    again.log_iteration(1, {"reward/mean": 0.5}, [], 200.0)
    again.finish(succeeded=True)

    assert told == 1
    assert [row.get("iteration", row.get("eval/version")) for row in rows(tmp_path)] == [0, 1, 1]
    assert [row["reward/mean"] for row in rows(tmp_path) if "reward/mean" in row] == [0.25, 0.5]
    assert [row["eval/pass@1"] for row in rows(tmp_path) if "eval/pass@1" in row] == [0.5]
    runs = [record.run for record in records(tmp_path) if record.WhichOneof("record_type") == "run"]
    assert {(run.run_id, run.project, run.run_group) for run in runs} == {("run", "tests", "g")}
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert (config["train"], config["lineage"]) == ({"seed": 7}, {"git.revision": "abc"})


def test_rows_that_a_killed_attempt_had_not_written_out_are_told_again(begin, tmp_path, monkeypatch):
    """wandb writes its file out every so many seconds: of the first attempt's three rows two are there, or any number."""
    monkeypatch.setenv("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", "0.2")
    first = begin()
    first.start("run", {}, {})
    first.log_iteration(0, {"reward/mean": 0.0}, [], 100.0)
    first.log_evaluation(1, {"eval/pass@1": 0.5}, 110.0)
    deadline = time.monotonic() + 20
    while len(rows(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    first.log_iteration(1, {"reward/mean": 0.1}, [], 200.0)
    first._process.signal_group()

    again = begin()
    again.start("run", {}, {})
    for iteration in range(again.logged_iterations(), 3):
        again.log_iteration(iteration, {"reward/mean": 0.1 * iteration}, [], 300.0)
    again.log_evaluation(1, {"eval/pass@1": 0.5}, 110.0)
    again.finish(succeeded=True)

    assert [row["iteration"] for row in rows(tmp_path) if "iteration" in row] == [0, 1, 2]
    assert [row["eval/version"] for row in rows(tmp_path) if "eval/version" in row] == [1]


@pytest.mark.parametrize("answers", [False, True])
def test_a_server_that_is_away_is_an_error_within_its_time(begin, monkeypatch, answers):
    """One that refuses connections, and one that takes them and never answers (as CASE 40)."""
    monkeypatch.setattr(module, "INIT_SECONDS", 2.0)
    monkeypatch.setattr(module, "GRACE_SECONDS", 3.0)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if answers:
            listener.listen()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        tracker = begin("online")
        began = time.monotonic()

        with pytest.raises(TrackerError, match="Weights & Biases did not take") as caught:
            tracker.start("run", {}, {})

    assert time.monotonic() - began < 10
    assert KEY not in str(caught.value)
    assert [child for child in psutil.Process().children(recursive=True) if "wandb" in " ".join(child.cmdline())] == []


def test_without_a_key_it_says_so_and_asks_nobody(begin, monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))

    with pytest.raises(TrackerError, match="(?i)api.key"):
        begin("online").start("run", {}, {})


def test_a_process_that_died_is_an_error_and_the_next_start_a_new_one(begin):
    tracker = begin()
    tracker.start("run", {}, {})
    tracker._process.signal_group()

    with pytest.raises(TrackerError):
        tracker.log_iteration(0, {"reward/mean": 1.0}, [], 1.0)
    tracker.start("run", {}, {})

    assert tracker.logged_iterations() == 0
