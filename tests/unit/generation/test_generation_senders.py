"""The trainer's side of weight sync, as far as it needs no GPU."""

from pathlib import Path

import pytest
import torch

from rlhf_core.generation import senders
from rlhf_core.generation.senders import EngineClient, ShmSender, TransferSender
from rlhf_core.weights import TensorMeta, open_packed


class OneTensor:
    def __init__(self, value=1.0):
        self.value = value
        self.passes = 0

    def metadata(self):
        return [TensorMeta("w", torch.float32, (4,))]

    def __iter__(self):
        self.passes += 1
        yield "w", torch.full((4,), self.value)


class RecordingGroup:
    num_engines = 3

    def __init__(self):
        self.infos = None
        self.updates = []

    def init_weight_transfer(self, init_infos):
        self.infos = init_infos

    def update_weights(self, update):
        self.updates.append(update)


@pytest.fixture
def shared_memory(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(senders, "scratch_folder", lambda nbytes: tmp_path)
    return tmp_path


def test_shm_update_says_where_the_weights_lie(shared_memory):
    update = ShmSender(OneTensor(2.0), tag="run", rank=0).send(version=5)

    weights = open_packed(Path(update.payload["path"]), update.version, update.checksum)
    assert (update.version, update.backend) == (5, "shm")
    assert dict(weights)["w"].tolist() == [2.0] * 4


def test_other_ranks_only_take_part_in_gathering(shared_memory):
    source = OneTensor()

    assert ShmSender(source, tag="run", rank=1).send(version=5) is None
    assert source.passes == 1
    assert list(shared_memory.iterdir()) == []


def test_only_the_newest_file_of_this_run_stays(shared_memory):
    """A killed process left v7 behind; another run's file is not ours."""
    for name in ("rlhf-run-v00000007.pack", "rlhf-other-v00000007.pack"):
        (shared_memory / name).write_bytes(b"old")
    sender = ShmSender(OneTensor(), tag="run", rank=0)

    sender.send(version=8)
    sender.send(version=9)

    assert sorted(p.name for p in shared_memory.iterdir()) == ["rlhf-other-v00000007.pack", "rlhf-run-v00000009.pack"]
    sender.close()
    assert [p.name for p in shared_memory.iterdir()] == ["rlhf-other-v00000007.pack"]


def test_engines_get_consecutive_nccl_ranks():
    group = RecordingGroup()

    EngineClient(group, "nccl", workers_per_engine=2).init_weight_transfer_engine({"rank_offset": 1, "packed": True})

    assert [info["rank_offset"] for info in group.infos] == [1, 3, 5]
    assert all(info["packed"] for info in group.infos)


def test_ipc_needs_no_ranks():
    group = RecordingGroup()

    EngineClient(group, "ipc", workers_per_engine=1).init_weight_transfer_engine({"packed": False})

    assert group.infos == [{"packed": False}] * 3


class TwoCallsAround:
    """The order in which vLLM's trainer engines use their client."""

    def __init__(self, client):
        self.client = client

    def send_weights(self):
        self.client.start_weight_update()
        self.client.update_weights({"names": ["w"]})
        self.client.finish_weight_update()


def test_a_round_of_vllms_trainer_engine_is_one_update():
    group = RecordingGroup()
    client = EngineClient(group, "nccl", workers_per_engine=1)

    TransferSender(TwoCallsAround(client), client).send(version=6)

    [update] = group.updates
    assert (update.version, update.backend, update.payload) == (6, "nccl", {"names": ["w"]})
