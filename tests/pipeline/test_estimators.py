"""PPO learns: a short real run with a critic. The other estimators' curves are those of `python -m benchmarks.estimators`.

iteration     0      1      2      3      4      5      6
policy        waits  learns
mean reward  .03    .03    .03    .09    .29    .54    .81     (of three seeds, 0.75 to 0.86 at the end)
"""

import pytest

from flows.train import train
from rlhf_core.records import Stage
from rlhf_core.storage import RunStore
from tasks.lineage import iteration_metrics

pytestmark = [pytest.mark.examples, pytest.mark.pipeline, pytest.mark.stack, pytest.mark.timeout(600)]

ITERATIONS = 7
FASTER = [f"train.max_iterations={ITERATIONS}", "eval.dataset=[]", "ckpt.save_hf=false", "run.cpu_threads=1"]


async def test_ppo_learns_the_task_and_its_critic_the_values(prefect_api, ray_cluster, tmp_path) -> None:
    await train("ppo_tiny_cpu.yaml", [*FASTER, f"storage.root={tmp_path}"], "learns")

    store = RunStore("learns", str(tmp_path))
    metrics = [iteration_metrics(store, k) for k in range(ITERATIONS)]
    rewards = [of_iteration["reward/mean"] for of_iteration in metrics]
    assert max(rewards[:2]) < 0.06
    assert rewards[-1] > 0.4
    assert metrics[0]["critic/value_mean"] == 0
    assert metrics[-1]["critic/value_mean"] > 0.1
    steps = [store.stage(k, Stage.UPDATE)[0].body["optimizer_steps"] for k in range(ITERATIONS)]
    assert steps == list(range(ITERATIONS))  # none in the first
