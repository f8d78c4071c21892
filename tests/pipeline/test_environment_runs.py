"""The example configurations with environments, as whole runs on real parts: one iteration each, environments in processes."""

import json

import pytest

from flows.train import train
from rlhf_core.records import Stage, StopReason
from rlhf_core.storage import RunStore

pytestmark = [pytest.mark.pipeline, pytest.mark.stack, pytest.mark.agents, pytest.mark.timeout(600)]

SMALL = ["train.max_iterations=1", "ckpt.save_hf=false", "run.cpu_threads=1"]


@pytest.fixture
def finish(prefect_api, ray_cluster, tmp_path):
    """Run a configuration to its end."""

    async def run(name, *overrides):
        await train(name, [*SMALL, f"storage.root={tmp_path}", *overrides], name)
        return RunStore(name, str(tmp_path))

    return run


def rows_of(store):
    return store.read_trajectories(store.stage(0, Stage.ROLLOUT)[0].parts)


@pytest.mark.examples
async def test_environments_mixed_by_ratios_each_with_its_numbers(finish):
    store = await finish("environments_tiny_cpu", "rollout.batch_size=4", "rollout.n_samples_per_prompt=2")

    rows = rows_of(store)
    assert {row.datasource for row in rows} <= {
        "reasoning_gym/chain_sum",
        "textarena/GuessTheNumber-v0",
        "gymnasium/FrozenLake-v1",
    }
    for row in rows:
        assert row.label["environment"] == row.datasource
        assert row.reward is not None
        assert row.score == row.metrics["agent/success"]
        assert len(row.step_rewards) == len(row.action_ranges)
    evaluated = store.read_evaluation(0)["metrics"]
    assert evaluated["eval/reasoning_gym/chain_sum/turns_mean"] == 1
    assert evaluated["eval/textarena/GuessTheNumber-v0/samples"] == 4
    assert evaluated["eval/textarena/GuessTheNumber-v0/success"] <= 1
    trained = store.stage(0, Stage.EXPERIENCE)[0].body["metrics"]
    assert {f"reward/{source}/reward_mean" for source in {row.datasource for row in rows}} <= trained.keys()


@pytest.mark.examples
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("reasoning_gym_tiny_cpu", "Try again: 1 attempt is left."),
        ("textarena_tiny_cpu", "invalid move"),
        ("frozen_lake_tiny_cpu", "That names no action. Answer with one of: left, down, right, up."),
    ],
)
async def test_an_environment_answers_and_its_answer_is_no_action(finish, name, shown):
    store = await finish(name, "rollout.batch_size=2", "rollout.n_samples_per_prompt=2", "eval.dataset=null")

    rows = rows_of(store)
    assert {row.stop_reason for row in rows} <= {StopReason.DONE, StopReason.MAX_TURNS, StopReason.LENGTH}
    heard = [row for row in rows if len(row.action_ranges) > 1]
    assert heard
    assert all(row.action_ranges[1].start > row.action_ranges[0].end for row in heard)
    assert any(shown in row.transcript for row in heard)
    assert json.dumps(rows[0].label)
    assert store.stage(0, Stage.UPDATE)[0].body["version"] == 1
