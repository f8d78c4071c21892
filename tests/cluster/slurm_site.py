"""A real Slurm on machines of the tests: slurmctld on the switch, slurmd on each node, munge for all.

::

    with Slurm(network, ["sl1", "sl2"]) as slurm:
        job = slurm.submit("deployments/slurm/rlhf.sbatch", [...], environment)
        slurm.state(job); slurm.signal(job); slurm.start_now(job); slurm.output(job)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Self

import pytest
from machines import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from machines import Machine, Network

NEEDED = ("slurmctld", "slurmd", "sbatch", "scontrol", "munged")
CPUS = 2
START_SECONDS = 60.0

CONFIGURATION = """
ClusterName=rlhf-test
SlurmctldHost=switch({controller})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort=16817
SlurmdPort=16818
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=5,bf_interval=5
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
CGROUPS = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n"


class Slurm:
    """One controller, and nodes of ``CPUS`` each."""

    def __init__(self, network: Network, names: Sequence[str]) -> None:
        self._network = network
        self._folder = network.folder / "slurm"
        self._folder.mkdir()
        self._folder.parent.chmod(0o755)
        self._controller = network.switch
        self._names = names
        self._munged: subprocess.Popen[bytes] | None = None
        self._environment = {"SLURM_CONF": str(self._folder / "slurm.conf")}

    def __enter__(self) -> Self:
        machines = [self._network.add(name) for name in self._names]
        nodes = "\n".join(
            f"NodeName={machine.name} NodeAddr={machine.address} NodeHostname={machine.name} CPUs={CPUS} State=UNKNOWN"
            for machine in machines
        )
        text = CONFIGURATION.format(controller=self._controller.address, folder=self._folder, nodes=nodes)
        (self._folder / "slurm.conf").write_text(text)
        (self._folder / "cgroup.conf").write_text(CGROUPS)
        (self._folder / "state").mkdir()
        self._start_munge()
        self._daemon(self._controller, "slurmctld", "-D")
        for machine in machines:
            self._daemon(machine, "slurmd", "-D", "-N", machine.name)
        self._wait(
            lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(len(machines)), "idle nodes"
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._munged is not None:
            self._munged.kill()
            self._munged.wait()

    def run(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """A command of Slurm's; its output."""
        done = subprocess.run(
            ["nsenter", f"--target={self._controller.pid}", "--net", *command],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, **(environment or {}), **self._environment},
            timeout=START_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}{self._log_tail()}"
        return done.stdout

    def submit(self, script: str, command: Sequence[str], environment: Mapping[str, str], nodes: int = 2) -> int:
        """The number of the job."""
        options = ["--parsable", f"--nodes={nodes}", f"--output={self._folder}/job-%j.log"]
        return int(self.run("sbatch", *options, script, *command, environment=environment))

    def shown(self, job: int) -> dict[str, str]:
        """What Slurm says of a job."""
        words = self.run("scontrol", "show", "job", str(job)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def output(self, job: int) -> str:
        """Of its script, over all its starts; "" before the first."""
        log = self._folder / f"job-{job}.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def wait_for(self, job: int, state: str, seconds: float) -> None:
        """Until the job is in a state; fails where it has ended in another."""

        def reached() -> bool:
            now = self.shown(job)["JobState"]
            assert now == state or now not in ("COMPLETED", "FAILED", "CANCELLED"), f"{now}: {self.output(job)}"
            return now == state

        self._wait(reached, f"job {job} is {state}", seconds)

    def _start_munge(self) -> None:
        """Without a shared key, and so without the service of this machine."""
        folder = self._folder
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        command = ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key"]
        command += [f"--socket={folder}/munge.socket", f"--log-file={folder}/munged.log"]
        command += [f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed"]
        with (folder / "munged.out").open("wb") as out:
            self._munged = subprocess.Popen(command, stdout=out, stderr=out)
        self._wait((folder / "munge.socket").exists, "munge")

    def _daemon(self, machine: Machine, *command: str) -> None:
        machine.start(command[0], command, self._environment)

    def _wait(self, condition, what: str, seconds: float = START_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s; {self._log_tail()}"
            time.sleep(0.5)

    def _log_tail(self) -> str:
        logs = [*self._folder.glob("*.log"), *self._folder.glob("*.out")]
        return "\n".join(f"--- {log}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)


def skip_without_slurm() -> None:
    """Skip the test where Slurm is not installed."""
    missing = [name for name in NEEDED if shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/sbin") is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: apt-get install slurmctld slurmd slurm-client munge")
