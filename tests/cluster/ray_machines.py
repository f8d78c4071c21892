"""A Ray cluster of machines: a head, and others that join it and may be lost."""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable

    from conftest import Site
    from machines import Machine

PORT = 6379
STORE_BYTES = 2**28
JOIN_SECONDS = 90.0
# Ray finds a silent machine within seconds, instead of a minute.
IMPATIENT = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_grpc_client_keepalive_time_ms": "5000",
    "RAY_grpc_client_keepalive_timeout_ms": "5000",
}


class RayMachines:
    """``join`` machines: the first is the head."""

    def __init__(self, site: Site, **environment: str) -> None:
        self._network = site.network
        token = site.network.folder / "ray_token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_worker_niceness": "0"}
        ray["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"  # else, inherited from the tests, "0": no machine may join
        self.environment = {**site.environment, **ray, **IMPATIENT, **environment}
        self.machines: list[Machine] = []

    @property
    def head(self) -> Machine:
        """Where Ray's head is."""
        return self.machines[0]

    def join(self, name: str, cpus: int) -> Machine:
        """A new machine of the cluster."""
        machine = self._network.add(name)
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--num-cpus={cpus}"]
        command += [f"--node-ip-address={machine.address}", f"--object-store-memory={STORE_BYTES}"]
        if not self.machines:
            command += ["--head", f"--port={PORT}", "--include-dashboard=false"]
            self.environment["RAY_ADDRESS"] = f"{machine.address}:{PORT}"
        else:
            command += [f"--address={self.environment['RAY_ADDRESS']}"]
        self.machines.append(machine)
        machine.start("ray", command, self.environment)
        deadline = time.monotonic() + JOIN_SECONDS
        while "Ray runtime started" not in machine.log("ray").read_text():
            assert time.monotonic() < deadline, machine.log("ray").read_text()
            time.sleep(0.2)
        return machine


def actors_on(machine: Machine) -> set[str]:
    """Ray's titles of the actors that run on a machine, such as ``ray::PolicyWorker``."""
    network = _network_of(machine.pid)
    return {title for pid, title in _titles() if title.startswith("ray::") and _network_of(pid) == network}


def _titles() -> Iterable[tuple[int, str]]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            yield process.pid, " ".join(process.cmdline()).partition(".")[0].partition(" ")[0]


def _network_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    return ""
