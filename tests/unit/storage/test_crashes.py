"""Real processes that die by SIGKILL between two writes."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from storage_samples import manifest, trajectory

from rlhf_core.records import Stage
from rlhf_core.storage import CheckpointStore, ObjectStore, RunStore

WRITER = """
import os, signal, sys
from storage_samples import trajectory
from rlhf_core.storage import RunStore
run = RunStore("run", sys.argv[1])
for sample in range(3):
    run.publish_trajectories(1, [trajectory(sample=sample)])
print("published", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def run_until_killed(code, *arguments):
    here = Path(__file__)
    path = os.pathsep.join([str(here.parents[3]), str(here.parent)])
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture(params=["file", "s3"])
def durable_root(request, tmp_path):
    """Where a store lies that outlives its writer; S3 is a real server."""
    if request.param == "file":
        return str(tmp_path / "runs")
    return f"s3://{request.getfixturevalue('s3').bucket}/{tmp_path.name}"


def test_case_126_a_writer_killed_between_upload_and_manifest(durable_root):
    """The retry finds the dead writer's parts, adds what is missing, and each trajectory is in the manifest once."""
    dead = run_until_killed(WRITER, durable_root)
    run_store = RunStore("run", durable_root)

    assert (dead.returncode, dead.stdout) == (-signal.SIGKILL, "published\n"), dead.stderr
    assert run_store.stage(1, Stage.ROLLOUT) is None

    found = run_store.published_parts(1, Stage.ROLLOUT)
    again = run_store.publish_trajectories(1, [trajectory(sample=2)])
    added = run_store.publish_trajectories(1, [trajectory(sample=3)])
    ref = run_store.commit(manifest(sorted({*found, again, added}, key=lambda part: part.path)))

    rows = run_store.read_trajectories(run_store.read_manifest(ref).parts)
    assert sorted(row.sample_index for row in rows) == [0, 1, 2, 3]


def test_case_126_a_reader_beside_a_writer_never_sees_half_a_shard(durable_root, monkeypatch):
    """One process rewrites a large part without pause until it is killed; every read is whole."""
    monkeypatch.setattr("rlhf_core.storage.backends.s3.PART_BYTES", 5 * 2**20)
    noise = np.random.default_rng(0).standard_normal((200, 9000)).astype(np.float32)  # which does not compress
    rows = [trajectory(sample=i, tokens=range(9000), start=0, rollout_logprobs=noise[i]) for i in range(200)]
    run_store = RunStore("run", durable_root)
    part = run_store.publish_trajectories(1, rows)
    data = run_store.objects.read(part.path)

    writer = os.fork()
    if writer == 0:
        while True:
            run_store.objects.put(part.path, data)
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        assert len(run_store.read_trajectories([part])) == 200
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)

    assert run_store.published_parts(1, Stage.ROLLOUT) == [part]


def die_after(monkeypatch, writes):
    """This process is killed before its object number ``writes`` + 1 appears."""
    done = []

    def counted(act):
        def write(*arguments, **options):
            if len(done) == writes:
                os.kill(os.getpid(), signal.SIGKILL)
            done.append(arguments)
            act(*arguments, **options)

        return write

    for name in ("put", "put_once", "put_file"):
        monkeypatch.setattr(ObjectStore, name, counted(getattr(ObjectStore, name)))


def write_checkpoint(checkpoints, version, local_dir):
    entries = [entry for rank in ("rank0", "rank1") for entry in checkpoints.add_files(version, local_dir, rank)]
    checkpoints.commit(version, {"cursor": version}, entries)


@pytest.fixture
def state(tmp_path):
    """What each of two ranks saves: 2 files, so a checkpoint is 5 objects."""
    folder = tmp_path / "state"
    (folder / "optimizer").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"m" * 1000)
    (folder / "optimizer" / "moments").write_bytes(b"o" * 1000)
    return folder


@pytest.mark.parametrize("writes", range(6))
def test_case_9_a_checkpoint_is_visible_only_once_its_last_object_is_written(
    durable_root, state, writes, monkeypatch, caplog
):
    checkpoints = CheckpointStore(RunStore("run", durable_root))
    write_checkpoint(checkpoints, 1, state)
    monkeypatch.setattr("rlhf_core.storage.checkpoints.TRANSFERS", 1)

    writer = os.fork()
    if writer == 0:
        die_after(monkeypatch, writes)
        write_checkpoint(checkpoints, 2, state)
        os._exit(0)
    _, status = os.waitpid(writer, 0)

    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        version, body = checkpoints.newest()
    assert (
        time.monotonic() - began < 10
    )  # a fork must not cost its parent an answer, which is asked for again after 20 s
    assert os.WIFSIGNALED(status) == (writes < 5)
    assert (version, body["cursor"]) == ((2, 2) if writes == 5 else (1, 1))
    assert ("v00000002 is incomplete: checkpoint.json is missing" in caplog.text) == (0 < writes < 5)


def write_stage(run_store, iteration):
    parts = [run_store.publish_trajectories(iteration, [trajectory(sample=i, iteration=iteration)]) for i in range(2)]
    run_store.commit(manifest(parts, iteration=iteration))


@pytest.mark.parametrize("writes", range(4))
def test_case_9_a_stage_is_complete_only_once_its_manifest_is_written(durable_root, writes, monkeypatch):
    """2 parts and the manifest: 3 objects. The next attempt publishes nothing twice, whatever it finds."""
    run_store = RunStore("run", durable_root)
    write_stage(run_store, 0)

    writer = os.fork()
    if writer == 0:
        die_after(monkeypatch, writes)
        write_stage(run_store, 1)
        os._exit(0)
    _, status = os.waitpid(writer, 0)

    complete = [k for k in (0, 1) if run_store.stage(k, Stage.ROLLOUT) is not None]
    assert os.WIFSIGNALED(status) == (writes < 3)
    assert complete == ([0, 1] if writes == 3 else [0])
    assert len(run_store.published_parts(1, Stage.ROLLOUT)) == min(writes, 2)
    write_stage(run_store, 1)
    assert len(run_store.objects.list("iterations/00000001")) == 3


def test_case_9_an_attempt_after_the_crash_completes_the_checkpoint(durable_root, state, monkeypatch):
    checkpoints = CheckpointStore(RunStore("run", durable_root))
    writer = os.fork()
    if writer == 0:
        die_after(monkeypatch, 3)
        write_checkpoint(checkpoints, 2, state)
        os._exit(0)
    os.waitpid(writer, 0)

    write_checkpoint(checkpoints, 2, state)

    assert checkpoints.newest()[0] == 2
    assert len(checkpoints.files(2)) == 4
