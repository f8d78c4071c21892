"""The seam between trainer and engines."""

import pickle

import torch

from rlhf_core.weights import TensorMeta, WeightUpdate, total_bytes


class TwoTensors:
    def metadata(self):
        return [TensorMeta("a", torch.float32, (2, 3)), TensorMeta("b", torch.bfloat16, ())]

    def __iter__(self):
        raise AssertionError("metadata must be enough")


def test_total_bytes_needs_no_iteration():
    assert total_bytes(TwoTensors()) == 2 * 3 * 4 + 2


def test_an_update_travels_between_processes():
    update = WeightUpdate(version=4, backend="shm", payload={"path": "x"}, checksum="abc")

    assert pickle.loads(pickle.dumps(update)) == update
