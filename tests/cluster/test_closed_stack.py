"""A stack with auth, while a run is on: who reaches its ports, who gets in, and where its secrets are written.

::

    outside (a namespace) ── every port that a process of the stack listens on ──▶ no answer
    here, without credentials ── Prefect, MLflow, Ray ──▶ refused
    a run whose reward function prints two secrets, and fails with them ──▶ in no file and no database
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

import httpx
import psutil
import pytest
from local_stack import ROOT, environment_of, rlhf
from machines import Network, skip_without_namespaces
from prefect_http import csrf_headers

from rlhf_cli.credentials import NOT_FOR_RAY, Credentials
from rlhf_core.storage import RunStore, trajectories

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

OF_THE_ENVIRONMENT, OF_A_BLOCK = "planted-in-the-environment-7391", "planted-in-a-block-4682"
JUDGE = """
import os

def reward_func(queries, prompts, labels, **kwargs):
    print("judging with", os.environ["JUDGE_API_KEY"], os.environ["JUDGE"])
    if any(len(query) % 3 == 0 for query in queries):  # of a batch that raised, each sample is asked for alone
        raise ValueError(f"refused: {os.environ['JUDGE_API_KEY']} {os.environ['JUDGE']}")
    return [float(len(query)) for query in queries]
"""
# In the namespace: says which of the places that it is told answer.
KNOCK = """
import json, socket, sys
for host, port in json.loads(sys.argv[1]):
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.settimeout(0.5)
        if probe.connect_ex((host, port)) == 0:
            print(host, port, flush=True)
"""


@dataclass
class Watched:
    """What was seen of the stack while its run was on."""

    environment: dict[str, str]
    store: RunStore
    ray_session: Path
    addresses: set[tuple[str, str]] = field(default_factory=set)  # (program, address it listened at)
    ports: set[int] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)  # to whom is outside

    @property
    def home(self) -> Path:
        return Path(self.environment["RLHF_HOME"])

    @property
    def credentials(self) -> Credentials:
        return Credentials(self.home)


class Outside:
    """Another machine, whose packets reach every address of this one."""

    def __init__(self, network: Network) -> None:
        self._machine = network.add("outside")
        held = [each.address for name in psutil.net_if_addrs().values() for each in name]
        self._hosts = [host for host in held if "." in host and not ip_address(host).is_loopback]
        here = next(host for host in self._hosts if host.rpartition(".")[0] == self._machine.address.rpartition(".")[0])
        self._run("ip", "route", "add", "default", "via", here)

    def answering(self, ports) -> set[str]:
        """Which of these ports answer, at whatever address."""
        places = [(host, port) for host in self._hosts for port in sorted(ports)]
        return set(self._run(sys.executable, "-S", "-c", KNOCK, json.dumps(places)).splitlines())

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            self._machine.command(arguments), capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    skip_without_namespaces()
    with Network(tmp_path_factory.mktemp("network")) as network:
        yield Outside(network)


@pytest.fixture(scope="module")
def watched(outside, tmp_path_factory):
    """A run on a stack with auth, watched from its first to its last second."""
    environment = environment_of(tmp_path_factory.mktemp("closed") / "home") | {"JUDGE_API_KEY": OF_THE_ENVIRONMENT}
    started = rlhf(environment, "up", "--auth")
    assert started.returncode == 0, started.stdout + started.stderr
    try:
        yield _watched_run(environment, outside, tmp_path_factory.mktemp("judge") / "judge.py")
    finally:
        stopped = rlhf(environment, "down")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr


def _watched_run(environment, outside, judge) -> Watched:
    judge.write_text(JUDGE)
    home = Path(environment["RLHF_HOME"])
    save = f"from prefect.blocks.system import Secret; Secret(value={OF_A_BLOCK!r}).save('judge')"
    client = environment | Credentials(home).of_clients
    subprocess.run([sys.executable, "-c", save], cwd=ROOT, env=client, check=True, timeout=120)
    overrides = ["train.max_iterations=1", "rollout.batch_size=4", "rollout.max_new_tokens=16", "eval.dataset=[]"]
    overrides += [
        f"reward.remote_url=[{judge}]",
        "reward.functions=[]",
        "reward.batch_size=4",
        "run.secrets={JUDGE: judge}",
    ]
    overrides += [f"storage.root={home / 'runs'}", "actor.num_gpus_per_node=2"]
    command = [sys.executable, "-c", "from rlhf_cli.main import main; main()", "launch", "--run-id", "closed"]
    command += ["-c", "configs/grpo_tiny_cpu.yaml", *overrides]
    watched = Watched(environment, RunStore("closed", str(home / "runs")), _ray_session(environment))
    log = judge.with_name("launch.log")
    with log.open("wb") as told:
        run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=told, stderr=told)
    deadline = time.monotonic() + 400
    while run.poll() is None:
        assert time.monotonic() < deadline, log.read_text()
        seen = set(_listening(environment))
        watched.addresses |= {(program, address) for program, address, _ in seen}
        ports = {port for _, _, port in seen}
        watched.ports |= ports
        watched.answered |= outside.answering(ports)
        time.sleep(0.3)
    assert run.returncode == 0, log.read_text()
    return watched


def _family(environment):
    """Every process of the stack: a program that renames itself overwrites its environment, but not its parent."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            kin = [process, *process.parents()]
            if any(each.environ().get("RLHF_HOME") == environment["RLHF_HOME"] for each in kin if each.pid > 1):
                yield process


def _listening(environment):
    for process in _family(environment):
        with contextlib.suppress(psutil.Error):
            name = " ".join(process.cmdline()).partition(".")[0][:60]
            for each in process.net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    yield name, each.laddr.ip, each.laddr.port


def _ray_session(environment) -> Path:
    [socket] = {
        Path(argument.partition("=")[2])
        for process in _family(environment)
        for argument in process.cmdline()
        if argument.startswith("--raylet_socket_name=")
    }
    return socket.parents[1]


# --- who reaches it


def test_the_probe_hears_what_listens_on_every_interface(outside):
    import socket

    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]

        assert {line.split()[1] for line in outside.answering({port})} == {str(port)}


def test_every_port_listens_on_loopback_alone(watched):
    elsewhere = {
        (program, address)
        for program, address in watched.addresses
        if not ip_address(address.removeprefix("::ffff:")).is_loopback
    }

    assert elsewhere == set()
    assert len(watched.ports) > 20  # servers, Ray's agents, workers, gloo, torch's store


def test_no_port_answers_from_another_network_namespace(watched):
    assert watched.answered == set()


# --- who gets in


@pytest.mark.parametrize("given", [None, ("rlhf", "guess")])
def test_prefect_refuses_who_has_not_the_password(watched, given):
    api, right = watched.environment["PREFECT_API_URL"], tuple(watched.credentials.prefect_file.read_text().split(":"))
    asked = {"url": f"{api}/flow_runs/filter", "json": {}, "headers": csrf_headers(api, right), "timeout": 30}

    assert httpx.post(**asked, auth=given).status_code == 401
    assert httpx.post(**asked, auth=right).status_code == 200


@pytest.mark.parametrize("given", [None, ("rlhf", "guess"), ("admin", "password1234")])
@pytest.mark.parametrize("path", ["/", "/api/2.0/mlflow/experiments/search?max_results=1", "/graphql", "/metrics"])
def test_mlflow_refuses_who_has_not_the_password(watched, path, given):
    url = f"http://127.0.0.1:{watched.environment['RLHF_MLFLOW_PORT']}{path}"

    assert httpx.get(url, auth=given, timeout=30).status_code == 401


def test_mlflow_lets_its_user_in(watched):
    url = f"http://127.0.0.1:{watched.environment['RLHF_MLFLOW_PORT']}/api/2.0/mlflow/experiments/search?max_results=9"

    found = httpx.get(url, auth=("rlhf", watched.credentials.mlflow_file.read_text()), timeout=30).json()

    assert "rlhf" in {experiment["name"] for experiment in found["experiments"]}


@pytest.mark.parametrize(
    "given", [{"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}]
)
def test_ray_refuses_who_has_not_the_token(watched, given):
    address = f"127.0.0.1:{watched.environment['RLHF_RAY_PORT']}"
    join = f"import ray; ray.init(address={address!r}); print('in')"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} | given

    done = subprocess.run(
        [sys.executable, "-c", join], env=environment, capture_output=True, text=True, timeout=120, check=False
    )

    assert done.returncode != 0
    assert "in\n" not in done.stdout
    assert "auth" in done.stderr.lower()


def test_a_second_up_keeps_auth_on_and_says_how_to_log_in(watched):
    again = rlhf(watched.environment, "up")
    status = rlhf(watched.environment, "status")

    assert again.returncode == 0, again.stderr
    for text in (again.stdout, status.stdout):
        assert f"(log in: the text of {watched.credentials.prefect_file})" in text
    assert "export PREFECT_API_AUTH_STRING=" in status.stdout
    assert json.loads(rlhf(watched.environment, "status", "--json").stdout)["auth"] is True


def test_processes_of_ray_have_no_credentials_of_the_servers(watched):
    environments = [
        process.environ() for process in _family(watched.environment) if "raylet" in " ".join(process.cmdline())
    ]

    assert environments
    assert not any(name in each for each in environments for name in NOT_FOR_RAY)


# --- where its secrets are


def test_no_secret_is_in_a_file_or_a_database(watched):
    secrets = [OF_THE_ENVIRONMENT, OF_A_BLOCK]
    secrets += [value for value in watched.credentials.of_clients.values() if value != "rlhf"]
    found = set()
    for folder in (watched.home, watched.ray_session):
        for file in folder.rglob("*"):
            if file.is_file() and watched.home / "auth" not in file.parents:
                held = file.read_bytes()
                found |= {(str(file), secret) for secret in secrets if secret.encode() in held}

    assert found == set()


def test_the_failures_are_told_all_the_same(watched):
    rows = trajectories(watched.store, 0, limit=100).to_pylist()
    errors = {str(row["reward_error"]) for row in rows}

    assert len(rows) == 32
    assert any("refused: *** ***" in error for error in errors), errors
    assert "judging with *** ***" in "".join(
        file.read_text(errors="replace") for file in (watched.ray_session / "logs").glob("worker-*.err")
    )
