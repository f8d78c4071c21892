"""A retraining that its schedule starts, for real: the deployment's cron, the stack's worker, training on the tiny model.

rlhf retrain --on ─▶ turn 1: promoted ─▶ new prompts ─▶ turn 2: refused ─▶ turns that find nothing new ─▶ rlhf retrain --off

The margin is half of what there is to win: from nothing a model can clear it, and then never again.
"""

import json
import subprocess
import sys
import time

import pytest
import yaml
from local_stack import ROOT, rlhf

from rlhf_core.lineage import make_registry
from rlhf_core.storage import RunStore
from rlhf_core.storage.retrain_log import RetrainLog

pytestmark = [pytest.mark.faults, pytest.mark.stack, pytest.mark.pipeline, pytest.mark.timeout(1500)]

NAME = "nightly"
TURN_SECONDS = 900
FLOW_RUNS = """
import asyncio, json
from prefect import get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
async def main():
    async with get_client() as client:
        of_retraining = DeploymentFilter(name=DeploymentFilterName(any_=["retrain"]))
        runs = await client.read_flow_runs(deployment_filter=of_retraining, limit=100)
        print(json.dumps([[r.state.name, r.state.message, r.auto_scheduled] for r in runs if r.state.is_final()]))
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("retraining")
    write_prompts(folder, "prompts", 128)
    write_prompts(folder, "held_out", 16)
    retraining = {
        "name": NAME,
        "config": str(ROOT / "configs" / "grpo_tiny_cpu.yaml"),
        "overrides": [
            f"storage.root={folder}/runs",
            f"data.prompt_dataset={folder}/prompts.jsonl",
            "data.id_key=id",
            "train.max_iterations=null",
            f"eval.dataset={folder}/held_out.jsonl",
            "ckpt.save_steps=-1",
        ],
        "margin": 0.5,
    }
    (folder / "retraining.yaml").write_text(yaml.safe_dump(retraining))
    return folder


@pytest.fixture(scope="module")
def fired(stack, place):
    """What the schedule has made, once two turns are over."""
    deploy_every_minute(stack, place)
    log = RetrainLog(RunStore(NAME, str(place / "runs")))
    try:
        assert rlhf(stack, "retrain", "--on").stdout.splitlines() == ["rlhf/retrain is on: cron * * * * *"]
        wait(lambda: log.numbers() and log.is_over(1), "turn 1")
        write_prompts(place, "prompts", 160)
        wait(lambda: len(log.numbers()) > 1 and log.is_over(2), "turn 2")
        wait(
            lambda: any("nothing to train on" in message for _, message, _ in flow_runs(stack)),
            "a turn without prompts",
        )
    finally:
        off = rlhf(stack, "retrain", "--off")
    assert off.stdout.splitlines() == ["rlhf/retrain is off: cron * * * * *"]
    return log


def write_prompts(folder, name, count):
    rows = [json.dumps({"id": f"{name}-{i}", "input": f"Number {i} of {name}: ", "label": None}) for i in range(count)]
    (folder / f"{name}.jsonl").write_text("\n".join(rows))


def deploy_every_minute(stack, place):
    """The deployment as it is shipped, with another cron and another file."""
    shipped = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())
    shipped["deployments"] = [each for each in shipped["deployments"] if each["name"] == "retrain"]
    shipped["deployments"][0]["schedules"][0]["cron"] = "* * * * *"
    shipped["deployments"][0]["parameters"] = {"config": str(place / "retraining.yaml")}
    (place / "prefect.yaml").write_text(yaml.safe_dump(shipped))
    command = [
        sys.executable,
        "-m",
        "prefect",
        "--no-prompt",
        "deploy",
        "--all",
        "--prefect-file",
        place / "prefect.yaml",
    ]
    environment = {**stack, "RLHF_PROJECT": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def wait(happened, what):
    deadline = time.monotonic() + TURN_SECONDS
    while not happened():
        assert time.monotonic() < deadline, f"{what} was not over within {TURN_SECONDS} s"
        time.sleep(1)


def flow_runs(stack):
    """(state, message, by the schedule) of every turn that is over."""
    done = subprocess.run(
        [sys.executable, "-c", FLOW_RUNS], env=stack, capture_output=True, text=True, timeout=60, check=True
    )
    return [(name, message or "", scheduled) for name, message, scheduled in json.loads(done.stdout.splitlines()[-1])]


def test_one_turn_promotes_and_one_refuses(fired) -> None:
    first, second = fired.decision(1), fired.decision(2)

    assert (first["verdict"], second["verdict"]) == ("promoted", "refused")
    assert first["numbers"]["difference"] > 0.5 > second["numbers"]["difference"]
    assert first["champion"]["model"] == "builtin:tiny"
    assert second["champion"]["model"] == first["challenger"]["model"]


def test_the_second_turn_trained_the_new_prompts_alone(fired) -> None:
    assert (fired.turn(1).row_count, fired.turn(2).row_count) == (128, 32)
    assert fired.seen() == {f"prompts-{i}" for i in range(160)}


def test_the_registry_has_the_champion_of_the_first_turn(fired, stack) -> None:
    registry = make_registry(f"http://127.0.0.1:{stack['RLHF_MLFLOW_PORT']}", NAME)

    assert registry.version("champion").checkpoint.spec == fired.decision(1)["challenger"]["model"]
    assert registry.version("latest").checkpoint.spec == fired.decision(2)["challenger"]["model"]


def test_every_turn_was_started_by_the_schedule_and_none_failed(fired, stack) -> None:
    runs = flow_runs(stack)

    assert {scheduled for _, _, scheduled in runs} == {True}
    assert {name for name, _, _ in runs} <= {"Completed", "Cancelled"}
    assert sum(message.startswith(("turn 1 promoted", "turn 2 refused")) for _, message, _ in runs) == 2
