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


@pytest.fixture(params=["file", "memory"])
def objects(request, tmp_path):
    """A store of each kind."""
    return ObjectStore(str(tmp_path / "store") if request.param == "file" else f"memory://{tmp_path.name}")


@pytest.fixture(params=["file", "memory"])
def run_store(request, tmp_path):
    """A run in a store of each kind."""
    return RunStore("run", str(tmp_path / "runs") if request.param == "file" else f"memory://{tmp_path.name}")


@pytest.fixture
def local_run(tmp_path):
    """A run in a folder."""
    return RunStore("run", str(tmp_path / "runs"))
