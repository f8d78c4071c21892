"""The local stack as a user meets it: up, a deployed run with --watch, a look at it, down, and nothing left behind.

rlhf up ─▶ prefect deployment run rlhf/train --watch ─▶ rlhf trajectories, status, doctor ─▶ rlhf down
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from local_stack import ROOT, rlhf

from rlhf_core.storage import RunStore

pytestmark = [pytest.mark.stack, pytest.mark.pipeline, pytest.mark.timeout(600)]

OVERRIDES = ["train.max_iterations=2", "rollout.batch_size=4", "rollout.max_new_tokens=16", "eval.dataset=[]"]


@pytest.fixture(scope="module")
def run(stack, tmp_path_factory):
    """A run of the deployment, started and watched with Prefect's own command."""
    root = tmp_path_factory.mktemp("stack-runs")
    overrides = json.dumps([*OVERRIDES, f"storage.root={root}"])
    command = [sys.executable, "-m", "prefect", "deployment", "run", "rlhf/train", "--watch"]
    command += ["--param", 'run_id="deployed"', "--param", f"overrides={overrides}"]
    done = subprocess.run(command, cwd=ROOT, env=stack, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return RunStore("deployed", str(root))


def test_up_again_changes_nothing(stack) -> None:
    before = json.loads((Path(stack["RLHF_HOME"]) / "stack.json").read_text())["pids"]

    again = rlhf(stack, "up")

    assert again.returncode == 0
    assert json.loads((Path(stack["RLHF_HOME"]) / "stack.json").read_text())["pids"] == before


def test_status_and_doctor_see_every_server(stack) -> None:
    status = json.loads(rlhf(stack, "status", "--json").stdout)
    doctor = json.loads(rlhf(stack, "doctor", "--json").stdout)

    assert {name: status[name] for name in ("prefect", "mlflow", "ray", "worker")} == dict.fromkeys(
        ("prefect", "mlflow", "ray", "worker"), True
    )
    assert all(server["answers"] for server in doctor["servers"].values())
    assert doctor["problems"] == []


def test_deployed_run_completes(run) -> None:
    assert run.completed_iterations() == [0, 1]


def test_each_iteration_is_one_flow_run_of_its_deployment(run, stack) -> None:
    probe = """
import asyncio, json
from prefect import get_client
async def main():
    async with get_client() as client:
        runs = await client.read_flow_runs(limit=50)
        print(json.dumps([[r.name, r.state.name, r.deployment_id is not None, r.parent_task_run_id is not None] for r in runs]))
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", probe], env=stack, capture_output=True, text=True, timeout=60, check=True
    )
    runs = {name: rest for name, *rest in json.loads(done.stdout.strip().splitlines()[-1])}

    assert runs["deployed iteration 0"] == runs["deployed iteration 1"] == ["Completed", True, True]


def test_trajectories_of_the_run_as_json(run, stack) -> None:
    shown = rlhf(stack, "trajectories", run.url, "--iteration", "1", "--limit", "3", "--json")

    rows = json.loads(shown.stdout)
    assert len(rows) == 3
    assert {"prompt", "answer", "reward", "mean_logprob", "stop_reason"} <= rows[0].keys()


def test_the_run_left_nothing_in_shared_memory(run) -> None:
    assert list(Path("/dev/shm").glob("rlhf-deployed-*")) == []
