"""A run that fails in iteration 1's reward stage, is mended, and retried: by the UI's button, or without Chromium by command.

iteration 0 done, iteration 1: rollout done, reward FAILED ──retry──▶ the same rollout, reward, …, iteration 2
"""

import json
import shutil
import subprocess
import sys
import time

import pytest
from local_stack import ROOT
from playwright.sync_api import sync_playwright

from rlhf_core.records import Stage
from rlhf_core.storage import RunStore

pytestmark = [pytest.mark.faults, pytest.mark.stack, pytest.mark.pipeline, pytest.mark.timeout(600)]

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
REWARD = """
from pathlib import Path

HERE = Path(__file__).parent

def reward_func(queries, prompts, labels):
    calls = HERE / "calls"
    done = len(calls.read_text()) if calls.exists() else 0
    if done == {good_calls} and not (HERE / "mended").exists():
        raise RuntimeError("the checker is broken")
    calls.write_text("x" * (done + 1))
    return [float(sum(c.isdigit() for c in query)) for query in queries]
"""
OVERRIDES = [
    "train.max_iterations=3",
    "rollout.batch_size=4",
    "rollout.max_new_tokens=16",
    "reward.functions=[]",
    "reward.num_workers=1",
    "reward.on_error=fail",
    "eval.dataset=[]",
]


def press_retry(url):
    """As a person does: the button, then the one of the dialogue."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1500, "height": 1000})
        page.goto(url, timeout=60_000)
        page.get_by_role("button", name="Retry").first.click(timeout=60_000)
        page.get_by_role("dialog").get_by_role("button", name="Retry").click(timeout=60_000)
        page.get_by_role("dialog").wait_for(state="hidden", timeout=60_000)
        browser.close()


def prefect(environment, *arguments):
    command = [sys.executable, "-m", "prefect", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def wait_for(condition, what, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.2)


def retry(environment, flow_run):
    """By the button, where there is a browser."""
    if CHROMIUM is None:
        prefect(environment, "flow-run", "retry", flow_run)
    else:
        press_retry(f"{environment['PREFECT_API_URL'].removesuffix('/api')}/runs/flow-run/{flow_run}")


def test_a_failed_run_goes_on_at_the_failed_stage(stack, tmp_path) -> None:
    (tmp_path / "checker.py").write_text(REWARD.format(good_calls=1))
    store = RunStore("mended", str(tmp_path / "runs"))
    overrides = [*OVERRIDES, f"reward.remote_url={tmp_path / 'checker.py'}", f"storage.root={tmp_path / 'runs'}"]
    started = prefect(
        stack,
        "deployment",
        "run",
        "rlhf/train",
        "--param",
        'run_id="mended"',
        "--param",
        f"overrides={json.dumps(overrides)}",
    )
    flow_run = started.split("/runs/flow-run/")[1].split()[0]
    wait_for(lambda: "Failed" in prefect(stack, "flow-run", "inspect", flow_run), "the failure")
    assert store.stage(1, Stage.REWARD) is None, "it failed somewhere else"
    before = {path: store.objects.read(path) for path in store.objects.list("iterations/00000001/rollout")}
    manifest = store.stage(1, Stage.ROLLOUT)

    (tmp_path / "mended").touch()
    retry(stack, flow_run)

    wait_for(lambda: store.read_end() == 3, "the end of the run")
    assert store.stage(1, Stage.ROLLOUT) == manifest
    assert {path: store.objects.read(path) for path in store.objects.list("iterations/00000001/rollout")} == before
    assert (tmp_path / "calls").read_text() == "xxx", "an iteration was scored twice, or not at all"
