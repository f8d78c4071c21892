"""The local stack: Prefect server and worker, MLflow, Ray. Everything binds to loopback and keeps its state in one folder.

::

    rlhf up ─▶ server ┐
               mlflow ├─ healthy ─▶ work pool, deployments, automations ─▶ worker
               ray    ┘
    $RLHF_HOME (default .rlhf): stack.json, logs/, prefect/, mlflow.db, ray_token, auth/, runs/, models/

Who is on this machine may use the servers; with ``up --auth`` only who has the credentials in auth/ (docs/security.md). Ray
always asks for its token.

Ports: $RLHF_PREFECT_PORT, $RLHF_MLFLOW_PORT, $RLHF_RAY_PORT.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from rlhf_cli.credentials import NOT_FOR_RAY, USER, Credentials, write_private
from rlhf_cli.leftovers import listening
from rlhf_cli.notify_url import NOTIFY_URL, notify_url
from rlhf_core.errors import RlhfError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

POOL = "rlhf"
HOST = "127.0.0.1"
START_SECONDS = 180.0
STOP_SECONDS = 10.0
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class StackError(RlhfError, RuntimeError):
    """A part of the local stack did not start. The message names its log."""


@dataclass(frozen=True)
class Ports:
    """Where the servers listen."""

    prefect: int = 4200
    mlflow: int = 5000
    ray: int = 6379

    def with_environment(self) -> Ports:
        """These ports, unless the environment says otherwise.

        Raises:
            StackError: what it says is no port.
        """
        return Ports(**{name: _port_from_environment(name, port) for name, port in asdict(self).items()})


@dataclass
class Stack:
    """The stack of one project folder. ``up`` and ``down`` may be called at any time, in any state."""

    home: Path
    project: Path
    ports: Ports
    pids: dict[str, int] = field(default_factory=dict)
    auth: bool = False  # Prefect and MLflow ask for credentials too

    @classmethod
    def here(cls) -> Stack:
        """The stack of the current folder, with what is recorded of it.

        A part that runs keeps its port; for the others the environment decides, then the record.
        """
        home = rlhf_home()
        try:
            recorded = json.loads((home / "stack.json").read_text())
            stack = cls(
                home,
                Path(recorded["project"]),
                Ports(**recorded["ports"]),
                dict(recorded["pids"]),
                auth=recorded.get("auth", False),
            )
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return cls(home, Path.cwd(), Ports().with_environment())
        running = {name: port for name, port in asdict(stack.ports).items() if stack.is_alive(name)}
        stack.ports = replace(stack.ports.with_environment(), **running)
        return stack

    @property
    def prefect_url(self) -> str:
        """The server's UI; its API is below ``/api``."""
        return f"http://{HOST}:{self.ports.prefect}"

    @property
    def mlflow_url(self) -> str:
        """The tracking server."""
        return f"http://{HOST}:{self.ports.mlflow}"

    @property
    def credentials(self) -> Credentials:
        """Of the servers; they exist where ``auth`` is on."""
        return Credentials(self.home)

    @property
    def environment(self) -> dict[str, str]:
        """What every process of the stack, and every client of it, needs to know."""
        prefect = self.home / "prefect"
        return {
            **(self.credentials.of_clients if self.auth else {}),
            "RLHF_HOME": str(self.home),
            "RLHF_PROJECT": str(self.project),
            "RAY_ADDRESS": f"{HOST}:{self.ports.ray}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.home / "ray_token"),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray listens on loopback alone: see rlhf_core.cluster
            "MLFLOW_TRACKING_URI": self.mlflow_url,
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "DO_NOT_TRACK": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "PREFECT_HOME": str(prefect),
            "PREFECT_API_URL": f"{self.prefect_url}/api",
            "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(prefect / "results"),
            "PREFECT_SERVER_MEMO_STORE_PATH": str(prefect / "memo_store.toml"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_UI_API_URL": "/api",  # else the UI calls port 4200 whatever the server's port is
            "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": self.prefect_url,  # of no other page that a browser here shows
            "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true",  # nor is what another page asks carried out unread
            # A crashed server must not keep concurrency slots taken.
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_CLIENT_MAX_RETRIES": "7",  # after 2, 4 … 128 s: a run outlives four minutes without the server
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",  # seconds: deployments/automations.yaml waits for three
            "PREFECT_LOGGING_EXTRA_LOGGERS": "rlhf",  # our own warnings belong to the flow run's log
            "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",  # and where there is none, to the terminal alone
            # SQLite has one writer at a time: what the server's services write, they write in batches.
            "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
            "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
            "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
            "PREFECT_API_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "200",
            "PREFECT_API_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "50",
        }

    def up(self, say: Callable[[str], None], auth: bool | None = None, concurrent_runs: int | None = None) -> None:
        """Start whatever is not running, and deploy.

        Args:
            say: is told what was done.
            auth: whether Prefect and MLflow ask for credentials from now on; None: as before.
            concurrent_runs: how many runs the worker has under way at a time, from now on; None: as before, at first one.

        Raises:
            StackError: a server did not start; the message names its log.
            ConfigError: $RLHF_NOTIFY_URL is no URL.
        """
        notify_url(os.environ)  # a mistake shows before anything starts
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._make_token()
        self._choose_auth(auth)
        started = [name for name in ("prefect", "mlflow", "ray") if self._start_server(name)]
        for name in ("prefect", "mlflow", "ray"):
            self._wait_for(name)
        if started:
            say(f"started {', '.join(started)}")
        limit = [] if concurrent_runs is None else ["--concurrent-runs", str(concurrent_runs)]
        self._run("deployments", [*_python("rlhf_cli.deployments"), *limit])
        if not self.is_alive("worker"):
            self._spawn("worker", [*_python("prefect"), "worker", "start", "--pool", POOL, "--type", "process"])
            say("started worker")
        for line in self.addresses:
            say(line)

    @property
    def addresses(self) -> list[str]:
        """Where people find the servers, and with what they log in."""
        prefect, mlflow = f"Prefect  {self.prefect_url}", f"MLflow   {self.mlflow_url}"
        if self.auth:
            prefect += f"   (log in: the text of {self.credentials.prefect_file})"
            mlflow += f"   (log in: {USER}, and the text of {self.credentials.mlflow_file})"
        return [prefect, mlflow, f"Ray      {HOST}:{self.ports.ray}"]

    @contextmanager
    def temporary_server(self) -> Iterator[None]:
        """A Prefect server that ends with the block, for a process that runs a flow with no stack.

        It keeps its history where the stack's server does, so that the runs show there later.
        """
        lone = Stack(self.home, self.project, replace(self.ports, prefect=free_port()), auth=self.auth)
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = self.home / "logs" / "prefect-temporary.log"
        log.parent.mkdir(exist_ok=True)
        names = (
            "RAY_ADDRESS",
            "RAY_AUTH_MODE",
            "RAY_AUTH_TOKEN_PATH",
            "MLFLOW_TRACKING_URI",
        )  # of servers that are down
        environment = {name: value for name, value in lone.environment.items() if name not in names}
        with log.open("ab") as out:
            process = subprocess.Popen(
                lone._command("prefect"),
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environment, **lone._server_credentials("prefect")},
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        try:
            deadline = time.monotonic() + START_SECONDS
            while not lone._answers("prefect"):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise StackError(f"the temporary Prefect server did not start; its log: {log}")
                time.sleep(0.3)
            os.environ.update(environment)
            yield
        finally:
            _end(process.pid)

    def down(self, say: Callable[[str], None]) -> None:
        """Stop everything that ``up`` started: the worker, which needs the others, and then these at once."""
        self.stop(say, "worker")
        self.stop(say, "ray", "mlflow", "prefect")

    def stop(self, say: Callable[[str], None], *names: str) -> None:
        """Stop parts, with every process below them."""
        alive = [name for name in names if self.is_alive(name)]
        _end(*(self.pids[name] for name in alive))
        for name in alive:
            say(f"stopped {name}")
        for name in names:
            self.pids.pop(name, None)
        if self.home.is_dir():
            self._record()

    def status(self) -> dict[str, bool]:
        """Which parts answer."""
        return {name: self.is_alive(name) and self._answers(name) for name in ("prefect", "mlflow", "ray", "worker")}

    def is_alive(self, name: str) -> bool:
        """True if the recorded process runs, and is the one we started rather than a later one with its number."""
        pid = self.pids.get(name)
        if pid is None:
            return False
        try:
            process = psutil.Process(pid)
            return process.status() != psutil.STATUS_ZOMBIE and process.environ().get("RLHF_HOME") == str(self.home)
        except psutil.Error:
            return False

    def _start_server(self, name: str) -> bool:
        if self.is_alive(name):
            return False
        port = getattr(self.ports, name)
        if _is_open(port):
            for left in listening(port, self.home):
                _end(left.pid)
        if _is_open(port):
            raise StackError(
                f"port {port} is taken by another program: stop it, or set RLHF_{name.upper()}_PORT to a free port"
            )
        self._spawn(name, self._command(name))
        return True

    def _command(self, name: str) -> list[str]:
        port = str(getattr(self.ports, name))
        if name == "prefect":
            return [*_python("rlhf_cli.prefect_server"), "server", "start", "--host", HOST, "--port", port]
        if name == "mlflow":
            return [
                *_python("mlflow"),
                *("server", "--host", HOST, "--port", port, "--workers", "1"),
                *(("--app-name", "basic-auth") if self.auth else ()),
                *("--backend-store-uri", f"sqlite:///{self.home / 'mlflow.db'}"),
                *("--artifacts-destination", str(self.home / "mlflow-artifacts")),
            ]
        return [
            *_python("ray.scripts.scripts"),
            *("start", "--head", "--block", "--node-ip-address", HOST, "--port", port),
            *("--include-dashboard", "false", "--disable-usage-stats", "--object-store-memory", str(2**30)),
        ]

    def _spawn(self, name: str, command: list[str]) -> None:
        logs = self.home / "logs"
        logs.mkdir(exist_ok=True)
        environment = {**os.environ, **self.environment, **self._server_credentials(name)}
        environment.pop(NOTIFY_URL, None)  # a secret that the server has in a block, and no run needs
        if name == "ray":
            environment = {key: value for key, value in environment.items() if key not in NOT_FOR_RAY}
            # Else `ray start` answers SIGTERM by waiting half a minute for tasks, of which a stack that goes down has none.
            environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"
        if name == "mlflow":
            environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # starts in half the time
        # SIGINT is what ends a Prefect worker, and a shell's background job would ignore it: a session of its own.
        with (logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self.project,
                env=environment,
                start_new_session=True,
            )
        self.pids[name] = process.pid
        self._record()

    def _run(self, what: str, command: list[str]) -> None:
        environment = {**os.environ, **self.environment}
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=self.project,
            env=environment,
            timeout=START_SECONDS,
            check=False,
        )
        if done.returncode:
            raise StackError(f"{what}: {' '.join(command[2:])} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")

    def _wait_for(self, name: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._answers(name):
                return
            time.sleep(0.3)  # first: a process that has just begun shows no environment yet
            if not self.is_alive(name):
                raise StackError(f"{name} ended while starting; its log: {self._log_tail(name)}")
        raise StackError(f"{name} did not answer within {START_SECONDS:g} s; its log: {self._log_tail(name)}")

    def _answers(self, name: str) -> bool:
        if name == "prefect":
            return _healthy(f"{self.prefect_url}/api/health")
        if name == "mlflow":
            return _healthy(f"{self.mlflow_url}/health")
        return _is_open(self.ports.ray) if name == "ray" else True

    def _log_tail(self, name: str) -> str:
        path = self.home / "logs" / f"{name}.log"
        return f"{path}\n{path.read_text(errors='replace')[-1500:]}"

    def _make_token(self) -> None:
        """Ray runs whatever code it is sent, by anybody on this machine who has the token."""
        path = self.home / "ray_token"
        if not path.exists():
            write_private(path, secrets.token_hex(32))

    def _choose_auth(self, auth: bool | None) -> None:
        if auth is not None and auth != self.auth:
            running = [name for name in ("prefect", "mlflow", "worker") if self.is_alive(name)]
            if running:
                asked = "without" if auth else "with"
                raise StackError(f"{', '.join(running)} run {asked} auth: give `rlhf down`, then this command again")
            self.auth = auth
            self._record()
        if self.auth:
            self.credentials.make()

    def _server_credentials(self, name: str) -> dict[str, str]:
        return self.credentials.of_server(name) if self.auth else {}

    def _record(self) -> None:
        body = {"ports": asdict(self.ports), "project": str(self.project), "pids": self.pids, "auth": self.auth}
        temporary = self.home / "stack.json.new"
        temporary.write_text(json.dumps(body, indent=1))
        temporary.replace(self.home / "stack.json")


def rlhf_home() -> Path:
    """Where the stack and local runs keep their state."""
    return Path(os.environ.get("RLHF_HOME", ".rlhf")).absolute()


def use_stack(stack: Stack) -> bool:
    """Make this process a client of the stack, if it runs. Call before prefect or ray are imported."""
    running = stack.is_alive("prefect")
    if running:
        os.environ.pop("RAY_AUTH_TOKEN", None)  # of a cluster of one's own; it would win over the stack's token file
        os.environ.update(stack.environment)
    return running


def _end_with_parent() -> None:
    """In a new process: be told to end when the parent has ended, however that was (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _port_from_environment(name: str, default: int) -> int:
    variable = f"RLHF_{name.upper()}_PORT"
    text = os.environ.get(variable, str(default))
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 2**16:
        raise StackError(f"{variable}={text!r} is no port: give a number from 1 to 65535, or unset it")
    return int(text)


def _python(module: str) -> list[str]:
    """A module of this environment, whatever is on the PATH."""
    return [sys.executable, "-m", module]


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0


def _end(*pids: int) -> None:
    """End processes and everything below them: gently, then not."""
    family = [member for pid in pids for member in _family(pid)]
    for sent in (signal.SIGTERM, signal.SIGKILL):
        for member in family:
            try:
                member.send_signal(sent)
            except psutil.NoSuchProcess:
                continue
        _, family = psutil.wait_procs(family, timeout=STOP_SECONDS)
        if not family:
            return


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
