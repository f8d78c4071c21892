"""Processor seconds of this process and all below it, by what they are: Ray's workers by name, Ray, Prefect, the controller."""

from __future__ import annotations

import re

import psutil

RAY_WORKER = re.compile(r"ray::(\w+)")  # Ray names the processes of actors after their class
ROLES = (("VLLM::", "vLLM"), ("prefect", "Prefect"), ("ray", "Ray"), ("gcs_server", "Ray"))  # the first that fits


class ProcessTimes:
    """Differences between two readings. A process that ended between them is lost: workers live as long as a run."""

    def __init__(self) -> None:
        self._before = _read()

    def lap(self) -> dict[str, float]:
        """Seconds by role since the last lap."""
        now = _read()
        spent: dict[str, float] = {}
        for pid, (role, seconds) in now.items():
            spent[role] = spent.get(role, 0.0) + seconds - self._before.get(pid, ("", 0.0))[1]
        self._before = now
        return spent


def _read() -> dict[int, tuple[str, float]]:
    """pid -> (role, seconds so far)."""
    own = psutil.Process()
    found = {own.pid: ("controller", _seconds(own))}
    for process in own.children(recursive=True):
        try:
            found[process.pid] = (role_of(process), _seconds(process))
        except psutil.Error:
            continue  # it just ended
    return found


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def role_of(process: psutil.Process) -> str:
    """What a process is for."""
    line = " ".join(process.cmdline())
    if worker := RAY_WORKER.match(line):
        return worker[1]
    return next((role for part, role in ROLES if part in line), process.name())
