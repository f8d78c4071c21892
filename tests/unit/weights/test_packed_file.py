"""Packed weight files: what was written is what is read, and anything else is refused."""

import errno
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlhf_core.errors import WeightSyncError
from rlhf_core.weights import packed_file
from rlhf_core.weights.packed_file import ALIGNMENT, open_packed, scratch_folder, write_packed


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(5, 7, generator=generator)
    return {
        "a.fp32": base,
        "b.bf16": base.to(torch.bfloat16),
        "c.fp16": base.to(torch.float16),
        "d.scalar": torch.tensor(3.5),
        "e.transposed": base.t(),
        "f.empty": torch.empty(0, 4),
    }


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Path, str]:
    path = tmp_path / "weights.pack"
    return path, write_packed(path, tensors().items(), version=3)


def test_what_was_written_is_read_bit_for_bit(packed):
    path, checksum = packed

    weights = open_packed(path, version=3, checksum=checksum)
    read = dict(weights)

    assert list(read) == list(tensors())
    for name, tensor in tensors().items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert torch.equal(read[name], tensor)


def test_nobody_else_may_read_it(packed):
    assert stat.S_IMODE(packed[0].stat().st_mode) == 0o600


def test_tensors_are_aligned(packed):
    for name, tensor in open_packed(packed[0]):
        assert tensor.data_ptr() % ALIGNMENT == 0 or name == "f.empty"


def test_tensors_outlive_the_file_and_writes_stay_private(packed):
    path, _ = packed

    mine, theirs = dict(open_packed(path))["a.fp32"], dict(open_packed(path))["a.fp32"]
    mine.zero_()
    path.unlink()

    assert mine.sum() == 0
    assert torch.equal(theirs, tensors()["a.fp32"])


def test_checksum_follows_bytes_names_and_shapes(tmp_path):
    one = torch.arange(6.0)

    sums = {
        write_packed(tmp_path / "x", [("w", one)], 1),
        write_packed(tmp_path / "x", [("v", one)], 1),
        write_packed(tmp_path / "x", [("w", one.reshape(2, 3))], 1),
        write_packed(tmp_path / "x", [("w", one + 1e-6)], 1),
    }

    assert len(sums) == 4
    assert write_packed(tmp_path / "x", [("w", one)], 2) in sums  # the version is not part of the weights


def test_other_version_is_refused(packed):
    with pytest.raises(WeightSyncError, match="policy version 3, not 4"):
        open_packed(packed[0], version=4)


def test_other_checksum_is_refused(packed):
    with pytest.raises(WeightSyncError, match="not 00000000"):
        open_packed(packed[0], checksum="00000000")


@pytest.mark.parametrize("place", [ALIGNMENT, ALIGNMENT + 100, -3])
def test_one_flipped_byte_is_refused(packed, place):
    path, _ = packed
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)

    with pytest.raises(WeightSyncError, match="damaged"):
        open_packed(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot read"),
        (b"abc", "truncated"),
        (b"x" * 500, "not a finished file"),
        (bytes(500), "not a finished file"),
    ],
)
def test_foreign_files_are_refused(tmp_path, content, message):
    path = tmp_path / "weights.pack"
    path.write_bytes(content)

    with pytest.raises(WeightSyncError, match=message):
        open_packed(path)


def test_truncated_file_is_refused(packed):
    path, _ = packed
    path.write_bytes(path.read_bytes()[:-10])

    with pytest.raises(WeightSyncError, match="truncated"):
        open_packed(path)


def test_other_format_is_refused(packed, monkeypatch):
    monkeypatch.setattr(packed_file, "FORMAT", 2)

    with pytest.raises(WeightSyncError, match="format 1, this version reads 2"):
        open_packed(packed[0])


def test_missing_file_names_the_remedy(tmp_path):
    with pytest.raises(WeightSyncError, match="share one machine"):
        open_packed(tmp_path / "nothing")


def test_a_writer_that_dies_leaves_no_file(tmp_path):
    def dying():
        yield "a", torch.ones(3)
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        write_packed(tmp_path / "weights.pack", dying(), 1)

    assert list(tmp_path.iterdir()) == []


def test_an_older_file_survives_a_failed_write(packed):
    path, checksum = packed

    with pytest.raises(WeightSyncError, match=r"tensor bad has type torch\.int64"):
        write_packed(path, [("bad", torch.ones(2, dtype=torch.int64))], 4)

    assert open_packed(path, 3).checksum == checksum


def test_full_file_system_names_the_remedy(tmp_path):
    def full():
        yield "a", torch.ones(3)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(WeightSyncError, match=r"no room .*--shm-size.* TMPDIR"):
        write_packed(tmp_path / "weights.pack", full(), 1)


def test_scratch_folder_falls_back_to_the_temporary_folder(tmp_path, monkeypatch):
    """A container's /dev/shm of 64 MiB: the next folder is taken; if that is full too, the error says what to do."""
    small = tmp_path / "shm"
    small.mkdir()
    free = {small: 64, tmp_path: 1000}
    monkeypatch.setattr(packed_file, "SHARED_MEMORY", small)
    monkeypatch.setattr(packed_file.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(packed_file.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[folder]))

    assert scratch_folder(10) == small
    assert scratch_folder(100) == tmp_path
    with pytest.raises(WeightSyncError, match="--shm-size"):
        scratch_folder(2000)
