"""Classical RLHF for real, on the tiny model: SFT ─▶ reward model ─▶ PPO, as ``make demo-rlhf`` with fewer iterations."""

import pytest
from prefect import get_client

from flows.chain import chain
from rlhf_core.lineage import ancestry
from rlhf_core.storage import CheckpointStore, RunStore, trajectories

pytestmark = [pytest.mark.examples, pytest.mark.pipeline, pytest.mark.stack, pytest.mark.timeout(600)]

CONFIG = "configs/chain_tiny_cpu.yaml"
STAGES = ("sft", "reward", "ppo")
ITERATIONS = 7


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return str(tmp_path_factory.mktemp("chain"))


@pytest.fixture(scope="module")
def overrides(root):
    return [f"storage.root={root}", "run.cpu_threads=1", f"ppo:train.max_iterations={ITERATIONS}"]


@pytest.fixture(scope="module")
async def done(prefect_api, ray_cluster, overrides):
    """What the finished chain ``demo`` returned."""
    return await chain(CONFIG, overrides, "demo")


def headline(done, stage, metric):
    [of_stage] = [result for result in done["stages"] if result["stage"] == stage]
    return next((h["first"], h["last"]) for h in of_stage["headlines"] if h["metric"] == metric)


async def test_each_stage_learns(done) -> None:
    """Issue 3, It-must-show 5: held-out accuracy above 0.9, and PPO raises the reward model's mean score."""
    _, accuracy = headline(done, "reward", "eval/accuracy")
    sampled, held_out = headline(done, "ppo", "reward/mean"), headline(done, "ppo", "eval/reward_mean")
    loss, digits = headline(done, "sft", "eval/loss"), headline(done, "ppo", "reward_log/digits")

    assert loss[1] < loss[0] - 1
    assert accuracy > 0.9
    assert sampled[1] > sampled[0] + 2
    assert held_out[1] > held_out[0] + 2
    assert digits[1] > digits[0] + 0.1  # what the preferences are about, which PPO never saw


async def test_the_final_policy_goes_back_to_the_preferences_and_the_base_model(done, root) -> None:
    ppo = ancestry(RunStore("demo-ppo", root))

    policy, reward = ppo.models
    assert (policy.roles, policy.run.run_id) == (("policy", "reference"), "demo-sft")
    assert (reward.roles, reward.run.run_id) == (("critic", "reward"), "demo-reward")
    assert reward.run.datasets == ("configs/tasks/preferences.py:pairs?count=768",)
    assert reward.run.models[0].run is policy.run
    assert policy.run.models[0].spec == "builtin:tiny"
    assert [line for line in done["lineage"] if ":pairs" in line]


async def test_each_run_used_the_last_checkpoint_of_the_one_before(done, root) -> None:
    ends = {name: RunStore(f"demo-{name}", root).newest_update()[0] + 1 for name in STAGES}
    recorded = {name: RunStore(f"demo-{name}", root).read_run()["models"] for name in STAGES}

    assert recorded["reward"]["policy"]["version"] == recorded["ppo"]["policy"]["version"] == ends["sft"]
    assert recorded["ppo"]["reward"]["version"] == recorded["ppo"]["critic"]["version"] == ends["reward"]
    assert recorded["ppo"]["reward"]["url"] == CheckpointStore(RunStore("demo-reward", root)).url(ends["reward"])


async def test_the_reward_model_scored_every_sample(done, root) -> None:
    rows = trajectories(RunStore("demo-ppo", root), limit=10_000).to_pylist()

    assert len(rows) == ITERATIONS * 128
    assert {row["reward_status"] for row in rows} == {"ok"}


async def test_each_stage_is_a_flow_run_below_the_chain(done) -> None:
    async with get_client() as client:
        runs = {run.name: run for run in await client.read_flow_runs(limit=200)}
        parents = [await client.read_task_run(runs[f"demo-{name}"].parent_task_run_id) for name in STAGES]

    assert {runs[f"demo-{name}"].state.name for name in STAGES} == {"Completed"}
    assert len({parent.flow_run_id for parent in parents}) == 1


async def test_a_finished_chain_started_again_changes_nothing(done, overrides, root) -> None:
    before = {name: RunStore(f"demo-{name}", root).objects.sizes("iterations") for name in STAGES}

    assert await chain(CONFIG, overrides, "demo", "must") == done
    assert {name: RunStore(f"demo-{name}", root).objects.sizes("iterations") for name in STAGES} == before
