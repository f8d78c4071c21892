"""A whole run of the example with an OpenAI client and two tools: flow, Ray, vLLM with its server, DeepSpeed."""

import pytest

from flows.train import train
from rlhf_core.records import RewardStatus, Stage, StopReason
from rlhf_core.storage import RunStore

pytestmark = [
    pytest.mark.examples,
    pytest.mark.pipeline,
    pytest.mark.stack,
    pytest.mark.agents,
    pytest.mark.timeout(600),
]

ITERATIONS = 2
SMALL = ["rollout.batch_size=4", "rollout.max_new_tokens=32", "run.cpu_threads=1"]


@pytest.fixture(scope="module")
async def run(prefect_api, mlflow_uri, ray_cluster, tmp_path_factory):
    root = str(tmp_path_factory.mktemp("runs"))
    places = [f"storage.root={root}", f"logger.mlflow_uri={mlflow_uri}"]
    result = await train("configs/openai_agent_tiny_cpu.yaml", [*SMALL, *places], "openai-agent")
    return result, RunStore("openai-agent", root)


def rows_of(store, iteration):
    return store.read_trajectories(store.stage(iteration, Stage.ROLLOUT)[0].parts)


async def test_every_episode_is_trained(run):
    result, store = run

    assert result["version"] == ITERATIONS
    for k in range(ITERATIONS):
        rows = rows_of(store, k)
        episodes = {(row.group_id, row.sample_index): row for row in rows}
        assert len(episodes) == 16
        assert {row.error for row in rows} == {None}
        assert {span.version for row in rows for span in row.version_spans} == {k}
        assert store.stage(k, Stage.EXPERIENCE)[0].rows == len(rows)


async def test_rows_hold_the_agents_rewards_and_metrics(run):
    _, store = run

    for row in rows_of(store, 0):
        assert row.reward_status is RewardStatus.OK
        assert 0 <= row.reward <= 1
        assert row.metrics["agent/calls"] >= 1
        assert row.metrics["agent/segments"] == 1
        assert "agent/tools_used" in row.metrics
        assert row.stop_reason in (StopReason.DONE, StopReason.LENGTH)


async def test_log_probs_of_engine_and_trainer_agree(run):
    """Also after a weight sync."""
    _, store = run

    for k in range(ITERATIONS):
        assert store.stage(k, Stage.UPDATE)[0].body["metrics"]["mismatch/logprob_abs_max"] < 1e-3
