"""SIGKILL of one process after the other while iterations overlap and groups are in flight: no prompt is lost or trained twice.

Where an asynchronous run is at a moment depends on the timing, so there is no calm run to compare with. What must hold of the
log does not: the ledger, the lag, each prompt once; and whoever is rebuilt is compared with the digests that the log has.
"""

from collections import Counter

import pytest
from fault_stack import FaultStack, kill, wait_until

from rlhf_core.records import Ledger, Stage

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3600)]

PROMPTS, ITERATIONS, LAG = 96, 16, 3
OVERRIDES = [
    "train.async_enable=true",
    "train.partial_rollout_enable=true",
    f"train.async_queue_size={LAG}",
    f"data.prompt_dataset=configs/tasks/digits.py:prompts?count={PROMPTS}",
    f"rollout.batch_size={PROMPTS // ITERATIONS}",
    "rollout.vllm_generate_batch_size=9",
    "rollout.n_samples_per_prompt=4",
    "rollout.max_new_tokens=96",
    "data.max_len=192",
    "rollout.ignore_eos=false",
    "rollout.publish_groups=1",
    "eval.dataset=configs/tasks/digits.py:prompts?count=4&seed=1000",
    "eval.steps=3",
    "ckpt.save_steps=5",
    "ckpt.best_metric_key=eval/score_mean",
    "run.cpu_threads=1",
    "run.max_restarts=5",
    "run.lease_seconds=60",
]
TITLES = {
    "rollout engine": "VLLM::EngineCore",
    "training rank": "ray::PolicyWorker",
    "rollout worker": "ray::RolloutWorker",
    "reward worker": "rlhf_core.rewards.worker",
}
SECONDS = 900.0


@pytest.fixture
def stack(tmp_path):
    running = FaultStack(tmp_path, on_s3=False)
    try:
        running.start()
        yield running
    finally:
        running.stop()


def test_whoever_is_killed_every_prompt_is_trained_once(stack) -> None:
    run_id = "overlapping"
    store = stack.store(run_id)
    parameters = {"overrides": [*OVERRIDES, f"storage.root={stack.root}"], "run_id": run_id}
    flow_run = stack.submit(parameters)

    def come_to(count):
        def there():
            state = stack.state(flow_run)
            assert state is None or state["type"] not in ("FAILED", "CANCELLED"), stack.errors(flow_run)
            return len(store.completed_iterations()) >= count

        wait_until(there, SECONDS, f"{count} iterations are done", pause=0.2)

    for number, victim in enumerate([*TITLES, "flow process"]):
        come_to(2 * number + 2)
        kill(stack.flow(run_id) if victim == "flow process" else stack.processes(TITLES[victim])[:1])
    wait_until(lambda: store.read_end() is not None, SECONDS, "the run ends", pause=1.0)

    trained = Counter()
    for k in range(ITERATIONS):
        played, _ = store.stage(k, Stage.ROLLOUT)
        rows = [row for row in store.read_trajectories(played.parts) if row.group_id in played.selected]
        assert len({row.key for row in rows}) == len(rows)
        trained.update({row.prompt_id for row in rows})
        assert all(k - LAG <= span.version <= k for row in rows for span in row.version_spans)
        body = store.stage(k, Stage.EXPERIENCE)[0].body
        assert Ledger(**body["ledger"]).balanced
        assert Ledger(**body["ledger_total"]).balanced
    total = Ledger(**body["ledger_total"])
    assert (total.drawn, total.trained + total.failed, total.buffered) == (PROMPTS, PROMPTS, 0)
    assert set(trained.values()) == {1}
    assert len(trained) == total.trained
    best = store.pointer("best")
    evaluations = {
        v: found["metrics"]["eval/score_mean"] for v in range(1, ITERATIONS + 1) if (found := store.read_evaluation(v))
    }
    assert best["value"] == max(evaluations.values()) == evaluations[best["version"]]
