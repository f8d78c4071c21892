"""SIGKILL of the processes that hold models, in the middle of a run. Nobody restarts anything by hand.

run          killed                                     must
calm         nobody
disturbed    after iteration 0: the rollout engine      complete, with the same weights
             after iteration 2: the policy's rank       after every iteration
             after iteration 3: the rollout worker
"""

import pytest
from victims import disturbed

from flows.train import train
from rlhf_core.records import Stage
from rlhf_core.storage import RunStore

pytestmark = [pytest.mark.pipeline, pytest.mark.stack, pytest.mark.timeout(600)]

ITERATIONS = 6
VICTIMS = [
    (0, Stage.UPDATE, "VLLM::EngineCore"),
    (2, Stage.UPDATE, "ray::PolicyWorker"),
    (3, Stage.UPDATE, "ray::RolloutWorker"),
]
SMALL = [
    f"train.max_iterations={ITERATIONS}",
    "rollout.batch_size=8",
    "rollout.n_samples_per_prompt=4",
    "eval.dataset=[]",
    "ckpt.save_steps=-1",  # so that a dead policy is re-made from the recorded updates alone
    "run.cpu_threads=1",
    "run.max_restarts=3",
]


def digests(store):
    return [store.stage(k, Stage.UPDATE)[0].body["digest"] for k in range(ITERATIONS)]


async def test_dead_workers_are_made_again_and_change_nothing(prefect_api, ray_cluster, tmp_path) -> None:
    """CASE 46, and more: the ledger law and every digest hold."""
    root = f"storage.root={tmp_path}"
    calm, other = RunStore("calm", str(tmp_path)), RunStore("disturbed", str(tmp_path))
    await train("configs/grpo_tiny_cpu.yaml", [*SMALL, root], "calm")

    await disturbed(train("configs/grpo_tiny_cpu.yaml", [*SMALL, root], "disturbed"), other, VICTIMS)

    assert digests(other) == digests(calm)
    for k in range(ITERATIONS):
        ledger = other.stage(k, Stage.EXPERIENCE)[0].body["ledger"]
        assert ledger["drawn"] == ledger["trained"] == 8
