"""What the machine says of processes."""

import os
import subprocess
import sys

from rlhf_core.telemetry.machine import gpus, resident_bytes


def test_memory_of_a_process_and_its_children():
    before = resident_bytes(os.getpid())
    hog = "import sys; held = bytearray(b'x') * (64 << 20); print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", hog], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        with_child, alone = resident_bytes(os.getpid()), resident_bytes(child.pid)
        child.stdin.close()

    assert alone > 64 << 20
    assert with_child - before > 48 << 20


def test_a_process_that_is_gone():
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()

    assert resident_bytes(child.pid) is None


def test_gpus_are_counted_or_there_are_none():
    for gpu in gpus():
        assert 0 <= gpu.used_bytes <= gpu.total_bytes
