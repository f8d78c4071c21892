"""Machines that are namespaces of this one: each has its own network, host name, processes, shared memory and /tmp/ray.

::

    with Network(folder) as network:                 switch 10.x.y.1 ─┬─ here 10.x.y.254
        first = network.add("first")                                  ├─ first 10.x.y.11
        first.start("ray", [...]); first.run([...])                   └─ …
        network.cut(first); first.kill()             no packet reaches it any more; all its processes are gone at once

Only root may make them. The file system is shared, as it is on most clusters, but for what is named above.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 20.0
RAY_FOLDER = Path("/tmp/ray")  # where Ray keeps its sockets, whatever $TMPDIR says

# bash, as the first process of the machine, takes over and reaps what other processes leave behind.
INIT = """
set -e
hostname "$NAME"
mount -t tmpfs tmpfs /dev/shm
mount --bind "$OWN" /tmp/ray
mount --bind "$HOSTS" /etc/hosts
ip link set lo up
touch "$OWN/up"
sleep infinity &
while kill -0 $!; do wait -n; done
"""


class Machine:
    """One of the network's. Its processes end with it."""

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.name, self.address = name, address
        self._folder = folder
        own = folder / "ray"
        own.mkdir(parents=True)
        RAY_FOLDER.mkdir(exist_ok=True)
        unshare = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL"]
        environment = {**os.environ, "NAME": name, "OWN": str(own), "HOSTS": str(folder.parent / "hosts")}
        with (folder / "init.log").open("wb") as log:
            self._unshare = subprocess.Popen([*unshare, "bash", "-c", INIT], stdout=log, stderr=log, env=environment)
        deadline = time.monotonic() + START_SECONDS
        while not (own / "up").exists():
            ended = self._unshare.poll() is not None or time.monotonic() > deadline
            assert not ended, (folder / "init.log").read_text()
            time.sleep(0.02)
        self.pid = psutil.Process(self._unshare.pid).children()[0].pid  # of its first process, as seen from here

    def command(self, arguments: Sequence[str]) -> list[str]:
        """What starts a program in it, in the project's folder."""
        enter = ["nsenter", f"--target={self.pid}", "--net", "--uts", "--mount", "--pid"]
        return [*enter, "env", f"--chdir={ROOT}", *arguments]

    def start(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """A program in the background, with a log of that name."""
        with self.log(name).open("ab") as log:
            return subprocess.Popen(
                self.command(arguments),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def log(self, name: str) -> Path:
        """Of a program."""
        return self._folder / f"{name}.log"

    def kill(self) -> None:
        """SIGKILL of every process in it, at once."""
        if self._unshare.poll() is None:
            psutil.Process(self.pid).kill()
            self._unshare.wait(START_SECONDS)


class Network:
    """A switch, and machines on it. A machine's address is in the hosts file of all that are added later, and of itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tag = f"{os.getpid() % 2**16:04x}"
        self._prefix = f"10.{64 + os.getpid() // 256 % 128}.{os.getpid() % 256}"
        self._machines: list[Machine] = []
        self.folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text("127.0.0.1 localhost\n")

    def __enter__(self) -> Self:
        self.switch = self._boot("switch", 1)
        self._in_switch("link", "add", "br0", "type", "bridge")
        self._in_switch("addr", "add", f"{self.switch.address}/24", "dev", "br0")
        self._in_switch("link", "set", "br0", "up")
        self._plug("here", target=os.getpid(), interface=f"rl{self._tag}", address=f"{self._prefix}.254")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for machine in reversed(self._machines):
            machine.kill()

    def add(self, name: str) -> Machine:
        """A machine that all others reach."""
        machine = self._boot(name, 10 + len(self._machines))
        self._plug(name, target=machine.pid, interface="eth0", address=machine.address)
        return machine

    def cut(self, machine: Machine) -> None:
        """From now on nothing comes from it, and nothing reaches it."""
        self._in_switch("link", "set", f"to-{machine.name}", "down")

    def _boot(self, name: str, number: int) -> Machine:
        address = f"{self._prefix}.{number}"
        with (self.folder / "hosts").open("a") as hosts:
            hosts.write(f"{address} {name}\n")
        machine = Machine(name, address, self.folder / name)
        self._machines.append(machine)
        return machine

    def _plug(self, name: str, target: int, interface: str, address: str) -> None:
        """A cable from the switch to the network that process ``target`` is in."""
        port = f"to-{name}"
        self._in_switch("link", "add", port, "type", "veth", "peer", "name", interface, "netns", str(target))
        self._in_switch("link", "set", port, "master", "br0", "up")
        _ip(target, "addr", "add", f"{address}/24", "dev", interface)
        _ip(target, "link", "set", interface, "up")

    def _in_switch(self, *arguments: str) -> None:
        _ip(self.switch.pid, *arguments)


def _ip(pid: int, *arguments: str) -> None:
    command = ["nsenter", f"--target={pid}", "--net", "ip", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def skip_without_namespaces() -> None:
    """Skip the test where this process may not make machines."""
    probe = "ip link add probe0 type veth peer name probe1"
    done = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", probe],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"this process may not make namespaces with networks (as root it may): {done.stderr.strip()}")
