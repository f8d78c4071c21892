"""An asynchronous run that is cancelled in the UI while iterations overlap: parent and children end, and the log goes on."""

import json

import httpx
import pytest
from prefect_http import csrf_headers
from test_retry import prefect, wait_for

from rlhf_core.records import Ledger, Stage
from rlhf_core.storage import RunStore

pytestmark = [pytest.mark.faults, pytest.mark.stack, pytest.mark.pipeline, pytest.mark.timeout(600)]

OVERRIDES = [
    "train.max_iterations=200",
    "train.num_episodes=100",
    "train.async_enable=true",
    "train.partial_rollout_enable=true",
    "rollout.batch_size=4",
    "rollout.max_new_tokens=48",
    "eval.dataset=[]",
    "run.lease_seconds=20",
]


def states(environment, run_id):
    """State of each iteration's flow run, by its name."""
    wanted = {"flow_runs": {"name": {"like_": f"{run_id} iteration"}}, "limit": 200}
    api = environment["PREFECT_API_URL"]
    found = httpx.post(f"{api}/flow_runs/filter", json=wanted, headers=csrf_headers(api), timeout=60).raise_for_status()
    return {run["name"]: run["state"]["name"] for run in found.json()}


def submit(environment, run_id, overrides):
    parameters = [f'run_id="{run_id}"', f"overrides={json.dumps(overrides)}"]
    started = prefect(environment, "deployment", "run", "rlhf/train", *(x for p in parameters for x in ("--param", p)))
    return started.split("/runs/flow-run/")[1].split()[0]


def state_of(environment, flow_run):
    shown = json.loads(prefect(environment, "flow-run", "inspect", flow_run, "--output", "json"))
    return shown["state"]["name"]


def test_a_cancelled_run_ends_with_its_iterations_and_goes_on_when_it_is_asked_for_again(stack, tmp_path) -> None:
    store = RunStore("cancelled", str(tmp_path / "runs"))
    overrides = [*OVERRIDES, f"storage.root={tmp_path / 'runs'}"]
    flow_run = submit(stack, "cancelled", overrides)
    wait_for(lambda: len(store.completed_iterations()) >= 3, "three iterations")
    wait_for(lambda: "Running" in states(stack, "cancelled").values(), "an iteration under way")

    prefect(stack, "--no-prompt", "flow-run", "cancel", flow_run)

    wait_for(lambda: state_of(stack, flow_run) == "Cancelled", "the cancellation", 120)
    wait_for(
        lambda: not {"Running", "Pending", "Cancelling"} & set(states(stack, "cancelled").values()),
        "the end of its iterations",
        60,
    )
    assert "Crashed" not in states(stack, "cancelled").values()
    done = store.completed_iterations()

    again = submit(stack, "cancelled", overrides)

    wait_for(lambda: len(store.completed_iterations()) >= len(done) + 2, "two more iterations")
    totals = [store.stage(k, Stage.EXPERIENCE)[0].body["ledger_total"] for k in store.completed_iterations()]
    assert all(Ledger(**total).balanced for total in totals)
    prefect(stack, "--no-prompt", "flow-run", "cancel", again)
    wait_for(lambda: state_of(stack, again) == "Cancelled", "the second cancellation", 120)
