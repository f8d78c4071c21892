"""A run over two machines, one of which is lost in the middle.

::

    first    Ray's head, the controller    engine-0  policy-0        weights: policy-0 ─▶ engine-0 by shared memory
    second                                 engine-1  policy-1                          ─▶ engine-1 over the network
    third    joins when second is gone     engine-1  policy-1        gradients: policy-0 ◀─▶ policy-1 over the network

    calm      undisturbed
    struck    in iteration 1, a rank has trained and the update is not recorded: second is cut off and killed, third joins
"""

import os
import sys
import time
from pathlib import Path

import pytest
from machines import ROOT
from ray_machines import RayMachines, actors_on

from rlhf_core.records import Stage
from rlhf_core.storage import RunStore

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

HOLDS = Path(__file__).parents[1] / "faults" / "holds"
ITERATIONS = 3
OVERRIDES = [
    f"train.max_iterations={ITERATIONS}",
    "actor.num_nodes=2",
    "actor.num_gpus_per_node=1",
    "vllm.num_engines=2",
    "train.colocate_all=true",  # one slot a machine: an engine and a rank
    "rollout.batch_size=4",
    "rollout.n_samples_per_prompt=4",
    "rollout.max_new_tokens=16",
    "train.batch_size=16",
    "train.micro_batch_size=8",
    "eval.dataset=[]",
    "ckpt.save_steps=-1",  # so that the policy is re-made from the recorded updates
    "run.cpu_threads=1",
]
SECONDS = 300
HELD = "updated-1"


@pytest.fixture(scope="module")
def cluster(site):
    """Of two machines."""
    holds = site.network.folder / "holds"
    holds.mkdir()
    known = {"RLHF_HOME": str(site.network.folder / "home"), "RLHF_HOLDS": str(holds)}
    cluster = RayMachines(site, **known, PYTHONPATH=os.pathsep.join([str(HOLDS), str(ROOT)]))
    cluster.join("first", cpus=1)
    cluster.join("second", cpus=1)
    return cluster


class Command:
    """``rlhf train`` on the head."""

    def __init__(self, site, cluster, run_id):
        self.run_id, self.store = run_id, RunStore(run_id, site.root)
        command = [sys.executable, "-c", "from rlhf_cli.main import main; main()", "train"]
        command += ["-c", "configs/grpo_tiny_cpu.yaml", "--run-id", run_id, f"storage.root={site.root}", *OVERRIDES]
        self.process = cluster.head.start(run_id, command, cluster.environment)
        self.log = cluster.head.log(run_id)
        self._held = site.network.folder / "holds" / HELD

    def reach(self):
        """Arm the point and wait until a rank is held there."""
        self._held.touch()
        deadline = time.monotonic() + SECONDS
        while not self._reached.exists():
            ended = self.process.poll() is not None or time.monotonic() > deadline
            assert not ended, self.tail
            time.sleep(0.1)

    def release(self):
        self._reached.unlink()

    def succeeds(self):
        assert self.process.wait(SECONDS) == 0, self.tail

    @property
    def digests(self):
        return [self.store.stage(k, Stage.UPDATE)[0].body["digest"] for k in range(ITERATIONS)]

    @property
    def tail(self):
        return self.log.read_text(errors="replace")[-6000:]

    @property
    def _reached(self):
        return self._held.with_name(f"{HELD}.reached")


def test_a_lost_machine_is_replaced_and_the_weights_are_the_same(site, cluster) -> None:
    calm = Command(site, cluster, "calm")
    calm.succeeds()

    struck = Command(site, cluster, "struck")
    struck.reach()
    first, second = cluster.machines
    on_both = actors_on(first) & actors_on(second)
    site.network.cut(second)
    second.kill()
    struck.release()
    cluster.join("third", cpus=1)
    struck.succeeds()

    assert {"ray::EngineWorker", "ray::PolicyWorker"} <= on_both
    assert "rebuilding workers" in struck.log.read_text()
    assert struck.digests == calm.digests
