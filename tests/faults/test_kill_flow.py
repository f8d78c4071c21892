"""``kill -9`` of the flow's process in the middle of a rollout, then the same command again.

attempt 1   iteration 0 done, iteration 1: some groups published  ──SIGKILL
attempt 2   iteration 0 untouched, policy re-made from the log, iteration 1: only the missing groups are sampled
"""

import contextlib
import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from rlhf_core.records import Stage
from rlhf_core.storage import RunStore

pytestmark = [pytest.mark.pipeline, pytest.mark.stack, pytest.mark.timeout(600)]

# Few sequences at a time: groups finish one after the other, each in a shard of its own.
OVERRIDES = [
    "train.max_iterations=2",
    "rollout.batch_size=16",
    "rollout.publish_groups=1",
    "vllm.max_num_seqs=8",
    "eval.dataset=[]",
    "ckpt.save_steps=-1",
    "run.lease_seconds=5",
]
SECONDS = 240


def start(root, home, log):
    command = [
        sys.executable,
        "-c",
        "from rlhf_cli.main import main; main()",
        "train",
        "-c",
        "configs/grpo_tiny_cpu.yaml",
    ]
    command += ["--run-id", "killed", f"storage.root={root}", *OVERRIDES]
    environment = {**os.environ, "RLHF_HOME": str(home)}
    return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def wait_until(condition, process, seconds=SECONDS):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run ended too early"
        assert time.monotonic() < deadline, "the moment to kill never came"
        time.sleep(0.005)


def kill(pid, with_workers):
    """SIGKILL the flow's process, and with it everything it has started, Ray and engines included."""
    below = psutil.Process(pid).children(recursive=True) if with_workers else []
    for victim in [psutil.Process(pid), *below]:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()


@pytest.mark.parametrize("victim", ["flow", "everything"])
def test_killed_flow_resumes_without_repeating(prefect_api, tmp_path, home, victim) -> None:
    root = tmp_path / "runs"
    store = RunStore("killed", str(root))
    with (tmp_path / "log").open("wb") as log:
        first = start(root, home, log)
        wait_until(lambda: len(store.published_parts(1, Stage.ROLLOUT)) >= 2, first)
        kill(first.pid, with_workers=victim == "everything")
        first.wait()
    assert store.stage(1, Stage.ROLLOUT) is None, "the rollout was over before the kill"
    before = {path: store.objects.read(path) for path in store.objects.list("iterations/00000000")}
    published = {part.sha256 for part in store.published_parts(1, Stage.ROLLOUT)}

    with (tmp_path / "log2").open("wb") as log:
        second = start(root, home, log)
        code = second.wait(SECONDS)

    assert code == 0, (tmp_path / "log2").read_text()[-3000:]
    assert {path: store.objects.read(path) for path in before} == before
    rollout, _ = store.stage(1, Stage.ROLLOUT)
    assert published <= {part.sha256 for part in rollout.parts}
    assert len(published) <= rollout.body["resumed_groups"] <= 16
    assert victim == "flow" or rollout.body["resumed_groups"] < 16, "nothing was left to sample"
    rows = store.read_trajectories(rollout.parts)
    assert len({row.key for row in rows}) == len(rows) == 128
    result = json.loads((tmp_path / "log2").read_text().rsplit("{", 1)[1].join(["{", ""]))
    assert result["version"] == 2
