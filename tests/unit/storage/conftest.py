import os

import fsspec
import pytest
from storage_samples import ScriptedFileSystem

from rlhf_core.storage import ObjectStore, RunStore


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch):
    """Do not wait for the disk: a killed process loses nothing by it, only a machine without power does."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def scripted():
    """A remote file system under ``scripted://`` that fails by a script."""
    fsspec.register_implementation("scripted", ScriptedFileSystem, clobber=True)
    ScriptedFileSystem.reset()
    return ScriptedFileSystem


@pytest.fixture(params=["file", "memory", "s3"])
def root(request, tmp_path):
    """Where a store of each kind may lie; S3 is a real server."""
    if request.param == "s3":
        return f"s3://{request.getfixturevalue('s3').bucket}/{tmp_path.name}"
    return str(tmp_path / "store") if request.param == "file" else f"memory://{tmp_path.name}"


@pytest.fixture
def objects(root):
    """A store of each kind."""
    return ObjectStore(root)


@pytest.fixture
def run_store(root):
    """A run in a store of each kind."""
    return RunStore("run", root)


@pytest.fixture
def local_run(tmp_path):
    """A run in a folder."""
    return RunStore("run", str(tmp_path / "runs"))
