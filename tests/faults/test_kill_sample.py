"""A sample of the kill matrix for every day: one process of a run after the other dies, and the weights stay the same.

::

    iteration   held in                        SIGKILL of                     what goes on
    1           rollout, half generated        vLLM's engine process          the run, by itself
    2           advantage                      the rollout worker             the run, by itself
    2           update, trained, not recorded  the policy's rank              the run, by itself: model + recorded updates
    3           rollout, half published        the run itself                 the same command: only what is missing is sampled
"""

import json
import os
import subprocess
import sys

import psutil
import pytest
from fault_stack import HOLDS, ROOT, kill, title_of, wait_until

from flows.train import train
from rlhf_core.records import Stage
from rlhf_core.storage import RunStore

pytestmark = [pytest.mark.examples, pytest.mark.pipeline, pytest.mark.stack, pytest.mark.timeout(600)]

ITERATIONS = 4
SMALL = [
    f"train.max_iterations={ITERATIONS}",
    "rollout.batch_size=8",
    "rollout.n_samples_per_prompt=4",
    "rollout.publish_groups=1",
    "train.batch_size=16",  # two optimizer steps: so the ranks are asked for log-probs before
    "vllm.max_num_seqs=4",  # groups finish one after the other, each in a shard of its own
    "eval.dataset=[]",
    "ckpt.save_steps=-1",  # so that a dead policy is re-made from the recorded updates alone
    "run.cpu_threads=1",
    "run.max_restarts=3",
    "run.lease_seconds=5",
]
HELD = {"rollout-1": "generating", "advantage-2": "advantage-2", "updated-2": "updated-2", "rollout-3": "generating"}
SECONDS = 240
GONE_SECONDS = 60


class Command:
    """``rlhf train`` in a process of its own, with a Ray of its own, that is held where the test wants it."""

    def __init__(self, folder, home, number):
        self.holds = folder / "holds"
        self.holds.mkdir(exist_ok=True)
        self.log = folder / f"log{number}"
        arguments = [
            "train",
            "-c",
            "configs/grpo_tiny_cpu.yaml",
            "--run-id",
            "killed",
            f"storage.root={folder}",
            *SMALL,
        ]
        path = os.pathsep.join(filter(None, [str(HOLDS), os.environ.get("PYTHONPATH")]))
        mine = {"RLHF_HOME": str(home), "RLHF_HOLDS": str(self.holds), "PYTHONPATH": path}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from rlhf_cli.main import main; main()", *arguments],
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, **mine},
                start_new_session=True,
            )

    def reach(self, point):
        """Wait until the run is held there."""

        def held():
            assert self.process.poll() is None, f"the run ended before {point}: {self.tail}"
            return self._reached(point).exists()

        (self.holds / point).touch()
        wait_until(held, SECONDS, f"the run comes to {point}", 0.02)

    def release(self, point):
        """Let it go on."""
        self._reached(point).unlink()

    def below(self, title=""):
        """What it started, by the beginning of the process's title."""
        try:
            family = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [each for each in family if title_of(each).startswith(title)]

    @property
    def tail(self):
        return self.log.read_text(errors="replace")[-3000:]

    def _reached(self, point):
        return self.holds / f"{HELD[point]}.reached"


async def test_whoever_is_killed_the_weights_are_the_same(prefect_api, ray_cluster, tmp_path, home) -> None:
    """CASE 46, and more: digests, the ledger law, and nothing published is sampled again or lost."""
    calm, store = RunStore("calm", str(tmp_path)), RunStore("killed", str(tmp_path))
    await train("configs/grpo_tiny_cpu.yaml", [*SMALL, f"storage.root={tmp_path}"], "calm")

    published = disturb(Command(tmp_path, home, 1), store)
    before = {path: store.objects.read(path) for path in store.objects.list("iterations/00000000")}
    again = Command(tmp_path, home, 2)
    code = again.process.wait(SECONDS)

    assert code == 0, again.tail
    assert digests(store) == digests(calm)
    assert ledgers(store) == ledgers(calm)
    assert {path: store.objects.read(path) for path in before} == before
    rollout, _ = store.stage(ITERATIONS - 1, Stage.ROLLOUT)
    assert published <= {part.sha256 for part in rollout.parts}
    assert len(published) <= rollout.body["resumed_groups"] < 8, "something was published, something was left to sample"
    rows = store.read_trajectories(rollout.parts)
    assert len({row.key for row in rows}) == len(rows) == 8 * 4
    assert json.loads(again.log.read_text().rsplit("{", 1)[1].join(["{", ""]))["version"] == ITERATIONS


def disturb(run, store):
    """Kill them one by one, the run itself last. Returns what was published of the rollout that was cut off."""
    victims = {"rollout-1": "VLLM::EngineCore", "advantage-2": "ray::RolloutWorker", "updated-2": "ray::PolicyWorker"}
    try:
        for point, title in victims.items():
            run.reach(point)
            kill(run.below(title))
            run.release(point)
        run.reach("rollout-3")
        wait_until(lambda: store.published_parts(3, Stage.ROLLOUT), SECONDS, "a group is published")
        published = {part.sha256 for part in store.published_parts(3, Stage.ROLLOUT)}
    finally:
        left = run.below()
        workers = [*run.below("VLLM::"), *(each for each in left if "Worker" in title_of(each))]
        run.process.kill()
        run.process.wait()
    _, alive = psutil.wait_procs(workers, GONE_SECONDS)
    kill(left)
    assert not alive, "workers outlived the run that began them, and its Ray"
    return published


def digests(store):
    return [store.stage(k, Stage.UPDATE)[0].body["digest"] for k in range(ITERATIONS)]


def ledgers(store):
    return [store.stage(k, Stage.EXPERIENCE)[0].body["ledger_total"] for k in range(ITERATIONS)]
