"""The example with a calculator, as a whole run on real parts."""

import pytest

from flows.train import train
from rlhf_core.records import Stage, StopReason
from rlhf_core.storage import RunStore

pytestmark = [
    pytest.mark.pipeline,
    pytest.mark.stack,
    pytest.mark.agents,
    pytest.mark.examples,
    pytest.mark.timeout(600),
]

SMALL = [
    "train.max_iterations=1",
    "rollout.batch_size=2",
    "run.cpu_threads=1",
    "agent.tools=python,configs/agents/calculator.py:calculator",
]


async def test_the_tiny_model_plays_with_tools_to_the_end(prefect_api, mlflow_uri, ray_cluster, tmp_path):
    root = str(tmp_path)

    await train("calculator_tiny_cpu", [*SMALL, f"storage.root={root}", f"logger.mlflow_uri={mlflow_uri}"], "tools")

    store = RunStore("tools", root)
    rows = store.read_trajectories(store.stage(0, Stage.ROLLOUT)[0].parts)
    assert len(rows) == 8
    assert all('"name": "calculator"' in row.prompt and '"name": "python"' in row.prompt for row in rows)
    assert {row.stop_reason for row in rows} <= {StopReason.DONE, StopReason.LENGTH}
    assert all(row.metrics["agent/turns"] == 1 and row.metrics["agent/tool_calls"] == 0 for row in rows)
    assert store.stage(0, Stage.UPDATE)[0].body["version"] == 1
