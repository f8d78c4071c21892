"""A run as a job of a real Slurm over two nodes, preempted in the middle.

::

    sl1   Ray's head, the run    \\  two ranks and two engines, which lie on both nodes
    sl2   a Ray node             /
    calm      undisturbed, on this machine alone
    job       SIGUSR1 to its script in iteration 1 ─▶ the step ends ─▶ checkpoint ─▶ requeued ─▶ started again ─▶ completed
"""

import os
import shutil
import stat
import subprocess
import sys
import time

import pytest
from machines import ROOT
from slurm_site import Slurm, skip_without_slurm

from rlhf_core.records import Stage
from rlhf_core.storage import CheckpointStore, RunStore

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

ITERATIONS = 6
OVERRIDES = [
    f"train.max_iterations={ITERATIONS}",
    "actor.num_nodes=2",
    "actor.num_gpus_per_node=1",
    "vllm.num_engines=2",
    "rollout.batch_size=4",
    "rollout.n_samples_per_prompt=4",
    "rollout.max_new_tokens=16",
    "train.batch_size=16",
    "train.micro_batch_size=8",
    "eval.dataset=[]",
    "ckpt.save_steps=-1",
    "run.cpu_threads=1",
]
SECONDS = 300


@pytest.fixture(scope="module")
def slurm(site):
    skip_without_slurm()
    with Slurm(site.network, ["sl1", "sl2"]) as slurm:
        yield slurm


def train(run_id, site):
    command = ["rlhf", "train", "-c", "configs/grpo_tiny_cpu.yaml", "--run-id", run_id]
    return [*command, f"storage.root={site.root}", *OVERRIDES]


def digests(store):
    return [store.stage(k, Stage.UPDATE)[0].body["digest"] for k in range(ITERATIONS)]


def test_a_preempted_job_goes_on_and_ends_with_the_same_weights(site, slurm, tmp_path) -> None:
    calm, store = RunStore("calm", site.root), RunStore("job", site.root)
    alone = {**os.environ, "RLHF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", "from rlhf_cli.main import main; main()", *train("calm", site)[1:]]
    subprocess.run(command, env=alone, cwd=ROOT, timeout=SECONDS, check=True, capture_output=True)
    secrets = tmp_path / "secrets"
    secrets.touch(mode=0o600)
    secrets.write_text("".join(f"{name}={value}\n" for name, value in site.s3.environment.items()))
    folder = tmp_path / "job"
    settings = {"RLHF_PYTHON": sys.executable, "RLHF_SECRETS": str(secrets), "RLHF_JOB_DIR": str(folder)}
    settings |= {"PYTHONPATH": str(ROOT), "RLHF_HOME": str(tmp_path / "home-of-job")}

    job = slurm.submit("deployments/slurm/rlhf.sbatch", train("job", site), settings)
    reach(lambda: store.stage(0, Stage.UPDATE), lambda: slurm.wait_for(job, "RUNNING", SECONDS))
    token = folder / "ray_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    first_token = token.read_text()
    slurm.run("scancel", "--batch", "--signal=USR1", str(job))
    slurm.wait_for(job, "PENDING", SECONDS)
    (saved, _) = CheckpointStore(store).newest()
    slurm.run("scontrol", "update", f"jobid={job}", "StartTime=now")  # Slurm lets a requeued job wait for two minutes
    slurm.wait_for(job, "COMPLETED", SECONDS)

    assert 0 < saved < ITERATIONS
    assert slurm.shown(job)["Restarts"] == "1"
    assert digests(store) == digests(calm)
    assert not token.exists()
    assert first_token not in slurm.output(job)


def reach(condition, check):
    """Wait until the condition is met; ``check`` fails once it cannot be any more."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        check()
        time.sleep(0.05)


def test_a_step_that_ends_ends_the_job_with_its_error(site, slurm, tmp_path) -> None:
    """Ray's port is taken: its head cannot start."""
    settings = {"RLHF_PYTHON": sys.executable, "RLHF_JOB_DIR": str(tmp_path), "RLHF_RAY_PORT": "16818"}

    job = slurm.submit("deployments/slurm/rlhf.sbatch", ["true"], settings)
    ended = ("COMPLETED", "FAILED", "CANCELLED")
    reach(lambda: slurm.shown(job)["JobState"] in ended, lambda: None)

    assert slurm.shown(job)["JobState"] == "FAILED"
    assert "step head has ended" in slurm.output(job)


def test_a_cancelled_job_stays_cancelled(site, slurm, tmp_path) -> None:
    """Slurm sends SIGTERM then, as it does for a preemption. One node, whose Ray is reached by nobody else."""
    settings = {"RLHF_PYTHON": sys.executable, "RLHF_JOB_DIR": str(tmp_path)}
    job = slurm.submit("deployments/slurm/rlhf.sbatch", ["sleep", "600"], settings, nodes=1)
    reach(lambda: "Ray at" in slurm.output(job), lambda: slurm.wait_for(job, "RUNNING", SECONDS))

    assert "Ray at 127.0.0.1:" in slurm.output(job)
    slurm.run("scancel", str(job))
    reach(lambda: "EndTime=Unknown" not in slurm.run("scontrol", "show", "job", str(job)), lambda: None)
    time.sleep(10)  # longer than Slurm waits before it kills

    assert slurm.shown(job)["JobState"] == "CANCELLED"
    assert slurm.shown(job)["Restarts"] == "0"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", ["deployments/slurm/rlhf.sbatch", "tests/cluster/packages.sh"])
def test_scripts_are_clean(script) -> None:
    subprocess.run(["shellcheck", script], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("command", "says"),
    [([], "no command"), (["rlhf", "train", "-c", "configs/grpo_tiny_cpu.yaml"], "give --run-id")],
)
def test_what_cannot_go_on_is_refused(command, says) -> None:
    alone = {"SLURM_JOB_ID": "1", "PATH": os.environ["PATH"]}

    done = subprocess.run(
        ["deployments/slurm/rlhf.sbatch", *command], cwd=ROOT, env=alone, capture_output=True, text=True, check=False
    )

    assert done.returncode == 1
    assert says in done.stderr


def test_secrets_that_others_may_read_are_refused(tmp_path) -> None:
    secrets = tmp_path / "secrets"
    secrets.touch(mode=0o644)
    alone = {"SLURM_JOB_ID": "1", "PATH": os.environ["PATH"], "RLHF_PYTHON": sys.executable}
    alone |= {"RLHF_JOB_DIR": str(tmp_path), "RLHF_SECRETS": str(secrets)}

    done = subprocess.run(
        ["deployments/slurm/rlhf.sbatch", "true"], cwd=ROOT, env=alone, capture_output=True, text=True, check=False
    )

    assert done.returncode == 1
    assert "chmod 600" in done.stderr
