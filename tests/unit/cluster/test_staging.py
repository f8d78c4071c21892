"""The folder in which a worker keeps a checkpoint on its way: bounded, and left behind by no crash for long."""

import os
import shutil
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest

from rlhf_core.cluster.staging import staging
from rlhf_core.errors import StorageError
from rlhf_core.storage import RunStore

STORE = RunStore("run", "memory://runs")
KILLED = """
import os, signal
from rlhf_core.cluster.staging import staging
from rlhf_core.storage import RunStore
with staging(RunStore("run", "memory://runs"), "policy-0") as folder:
    (folder / "half.safetensors").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def files_below(folder):
    return [path.name for path in folder.rglob("*") if path.is_file()]


def test_what_a_killed_process_left_is_gone_before_the_next_one_writes(temporary):
    subprocess.run([sys.executable, "-c", KILLED], check=False)
    assert files_below(temporary) == ["half.safetensors"]

    with staging(STORE, "policy-0") as folder:
        assert files_below(temporary) == []
        (folder / "whole").write_text("whole")

    assert files_below(temporary) == []


def test_nothing_is_left_of_a_save_that_fails(temporary):
    def fail():
        with staging(STORE, "policy-0") as folder:
            (folder / "half").write_text("half")
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        fail()

    assert files_below(temporary) == []


@pytest.mark.parametrize(
    ("free", "kind", "said"),
    [
        (2**20, StorageError, r"is on a full disk \(1 MiB left\): make room, or set TMPDIR .* \(unexpected pos"),
        (2**30, RuntimeError, r"^unexpected pos"),
    ],
)
def test_a_full_disk_is_named_whatever_the_library_says(monkeypatch, free, kind, said):
    """torch speaks of an unexpected position in a file."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))

    with pytest.raises(kind, match=said), staging(STORE, "policy-0"):
        raise RuntimeError("unexpected pos 576 vs 534")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused(temporary):
    theirs = temporary / f"rlhf-staging-{os.getuid()}"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)

    with pytest.raises(StorageError, match=f"{theirs} belongs to another user"), staging(STORE, "policy-0"):
        pass


def test_workers_and_runs_do_not_meet():
    other = RunStore("run", "memory://elsewhere")
    with staging(STORE, "policy-0") as a, staging(STORE, "policy-1") as b, staging(other, "policy-0") as c:
        assert len({a, b, c}) == 3
        assert all(folder.is_dir() and not any(folder.iterdir()) for folder in (a, b, c))
