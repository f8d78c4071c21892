"""What a rank says when the store does not take its part of a checkpoint."""

from types import SimpleNamespace

import pytest
from fault_proxy import FaultProxy, stall
from minimal_config import config

from rlhf_core.cluster.rank_worker import TrainedWorker
from rlhf_core.errors import StorageError
from rlhf_core.storage import CheckpointStore, RunStore


class Trained:
    """A model whose state is one small file."""

    average = None
    has_adapters = False

    def check_loaded(self):
        pass

    def save(self, folder):
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"w")

    def export_hf(self, folder):
        folder.mkdir(parents=True)


def worker(store):
    context = SimpleNamespace(config=config(), device="cpu", store=store, enter=lambda title: None)
    made = TrainedWorker(context, "policy", 3)
    made._trainer = Trained()
    return made


def test_case_120_a_save_that_stalls_names_rank_and_key(s3, tmp_path):
    root = f"s3://{s3.bucket}/{tmp_path.name}"
    with FaultProxy(s3.endpoint) as proxy:
        patient, hasty = (RunStore("run", root, {"endpoint_url": proxy.endpoint}, timeout=t) for t in (60, 1.5))
        CheckpointStore(patient).commit(1, {}, worker(patient).save(1))
        proxy.add(stall, "PUT", "v00000002")

        key = "v00000002/state/weights failed within 1.5 s"
        with pytest.raises(StorageError, match=rf"policy-3 could not save checkpoint 2: put_file s3://.*/{key}"):
            worker(hasty).save(2)

        assert CheckpointStore(patient).newest()[0] == 1
