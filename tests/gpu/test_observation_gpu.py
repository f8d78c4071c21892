"""What the driver says of GPUs, for the endpoint of a run."""

import pytest
import torch

from rlhf_core.telemetry.machine import gpus

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_the_memory_that_a_process_takes_is_seen():
    pytest.importorskip("pynvml", reason="nvidia-ml-py comes with the extra gpu")
    torch.zeros(1, device="cuda")  # the context itself takes memory
    before = gpus()
    held = torch.ones(512 << 20, dtype=torch.uint8, device="cuda")
    after = gpus()

    assert len(before) == len(after) >= 1
    assert all(0 < gpu.used_bytes <= gpu.total_bytes for gpu in after)
    assert max(now.used_bytes - then.used_bytes for then, now in zip(before, after, strict=True)) >= held.numel()
