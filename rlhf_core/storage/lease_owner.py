"""Which process holds a lease, and whether it can be told from here that it is gone."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class LeaseOwner:
    """A process that may hold a lease."""

    host: str
    machine: str  # boot and process namespace: two containers of one host name are two machines
    pid: int
    started: float  # when the process began, by the machine's own count: process ids are used again
    uuid: str
    job: str = ""  # what the process is an attempt at, if there may be others

    @classmethod
    def of_this_process(cls, job: str = "") -> LeaseOwner:
        """A new owner: this process, now."""
        pid = os.getpid()
        return cls(socket.gethostname(), _machine(), pid, _started(pid) or 0.0, uuid.uuid4().hex, job)

    @property
    def is_known_dead(self) -> bool:
        """True only if the process was on this machine and is gone; False where it cannot be told."""
        if (self.host, self.machine) != (socket.gethostname(), _machine()):
            return False
        return _started(self.pid) != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (owner {self.uuid[:8]})"


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return f"{uuid.getnode():x}"


def _started(pid: int) -> float | None:
    """When process ``pid`` began; None if it is not running.

    Linux counts in clock ticks since boot, which a change of the wall clock cannot move; elsewhere it is unix seconds.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None if Path("/proc/self/stat").exists() else _started_elsewhere(pid)
    state, ticks = fields[0], fields[19]
    return None if state in "ZX" else float(ticks)


def _started_elsewhere(pid: int) -> float | None:
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None
