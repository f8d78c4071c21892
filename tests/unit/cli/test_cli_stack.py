"""What is recorded of the local stack, and what is believed of it."""

import contextlib
import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from rlhf_cli.stack import Ports, Stack, StackError, use_stack

PORTS = ("RLHF_PREFECT_PORT", "RLHF_MLFLOW_PORT", "RLHF_RAY_PORT")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty $RLHF_HOME, and no port in the environment."""
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    for name in PORTS:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def sleeper(home):
    """Starts a process with or without the stack's mark in its environment; ends it afterwards."""
    started = []

    def start(mark):
        process = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], env={**os.environ, "RLHF_HOME": mark}
        )
        started.append(process)
        while psutil.Process(process.pid).environ().get("RLHF_HOME") != mark:
            time.sleep(0.01)  # it shows the environment of its parent, or none, until it has become its command
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def record(home, **changes):
    body = {"project": "/somewhere", "ports": {"prefect": 1201, "mlflow": 1202, "ray": 1203}, "pids": {}}
    (home / "stack.json").write_text(json.dumps(body | changes))


# --- ports


def test_the_default_ports():
    assert Ports().with_environment() == Ports(4200, 5000, 6379)


def test_the_environment_decides(monkeypatch):
    monkeypatch.setenv("RLHF_MLFLOW_PORT", "5050")

    assert Ports(1, 2, 3).with_environment() == Ports(1, 5050, 3)


@pytest.mark.parametrize("value", ["", "abc", "0", "65536", "-1", "4200.0", " 80", "²"])
@pytest.mark.parametrize("name", PORTS)
def test_what_is_no_port_is_refused_by_name(monkeypatch, name, value):
    monkeypatch.setenv(name, value)

    with pytest.raises(StackError, match=f"{name}={value!r} is no port: give a number from 1 to 65535"):
        Stack.here()


# --- the record


def test_without_a_record(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert Stack.here() == Stack(home, tmp_path, Ports())


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "{}", '{"project": "p", "ports": {"odd": 1}, "pids": {}}', '{"project": 3}', "\xff"],
)
def test_a_corrupt_record_is_no_record(home, tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    (home / "stack.json").write_text(text, encoding="latin-1")

    assert Stack.here() == Stack(home, tmp_path, Ports())


def test_a_record_is_read(home):
    record(home, pids={"prefect": 2**22 + 1})

    stack = Stack.here()

    assert (str(stack.project), stack.ports, stack.pids) == (
        "/somewhere",
        Ports(1201, 1202, 1203),
        {"prefect": 2**22 + 1},
    )


def test_a_part_that_does_not_run_gets_the_port_of_the_environment(home, monkeypatch):
    """The remedy of "port 1202 is taken: set RLHF_MLFLOW_PORT" must work."""
    record(home)
    monkeypatch.setenv("RLHF_MLFLOW_PORT", "5050")

    assert Stack.here().ports == Ports(1201, 5050, 1203)


def test_a_part_that_runs_keeps_its_port(home, sleeper, monkeypatch):
    record(home, pids={"mlflow": sleeper(str(home)).pid})
    monkeypatch.setenv("RLHF_MLFLOW_PORT", "5050")

    assert Stack.here().ports.mlflow == 1202


def test_what_is_recorded_is_read_back(home, tmp_path):
    stack = Stack(home, tmp_path, Ports(1, 2, 3), {"ray": 2**22 + 1})

    stack._record()

    assert Stack.here() == stack


# --- who lives


def test_our_own_process_is_alive(home, tmp_path, sleeper):
    stack = Stack(home, tmp_path, Ports(), {"ray": sleeper(str(home)).pid})

    assert stack.is_alive("ray")


def test_a_process_of_another_stack_is_not_ours(home, tmp_path, sleeper):
    """A later process got the number."""
    stack = Stack(home, tmp_path, Ports(), {"ray": sleeper("/another/home").pid})

    assert not stack.is_alive("ray")


@pytest.mark.parametrize("pids", [{}, {"ray": 2**22 + 1}, {"ray": 1}])
def test_no_process_or_a_foreign_one_is_not_ours(home, tmp_path, pids):
    assert not Stack(home, tmp_path, Ports(), pids).is_alive("ray")


def test_a_process_that_has_ended_is_not_alive(home, tmp_path, sleeper):
    process = sleeper(str(home))
    stack = Stack(home, tmp_path, Ports(), {"ray": process.pid})

    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and nobody has collected it yet

    assert not stack.is_alive("ray")


# --- down


def test_down_ends_what_is_ours_and_nothing_else(home, tmp_path, sleeper):
    ours, foreign = sleeper(str(home)), sleeper("/another/home")
    stack = Stack(home, tmp_path, Ports(), {"mlflow": ours.pid, "ray": foreign.pid})
    said = []

    stack.down(said.append)

    assert said == ["stopped mlflow"]
    assert ours.wait(5) is not None
    assert foreign.poll() is None
    assert Stack.here().pids == {}


def test_down_ends_several_at_once(home, tmp_path, monkeypatch):
    """One that answers SIGTERM late, or not at all, costs its time once for all."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    mark = {**os.environ, "RLHF_HOME": str(home)}
    deaf = {
        name: subprocess.Popen([sys.executable, "-c", code], env=mark, stdout=subprocess.PIPE)
        for name in ("ray", "mlflow", "prefect")
    }
    for process in deaf.values():
        process.stdout.readline()
    waits = []
    wait = psutil.wait_procs
    monkeypatch.setattr(
        psutil, "wait_procs", lambda family, timeout: waits.append(len(family)) or wait(family, timeout=0.5)
    )

    Stack(home, tmp_path, Ports(), {name: process.pid for name, process in deaf.items()}).down(lambda line: None)

    assert not any(psutil.pid_exists(process.pid) for process in deaf.values())
    assert [count for count in waits if count] == [3, 3], "asked at once, then killed at once"


def test_ray_does_not_wait_for_tasks_when_it_is_told_to_end(home, tmp_path, monkeypatch):
    """Its default is half a minute."""
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda *_, env, **__: started.append(env) or subprocess.CompletedProcess)
    monkeypatch.setattr(subprocess.CompletedProcess, "pid", 2**22 + 1, raising=False)

    Stack(home, tmp_path, Ports())._spawn("ray", ["true"])

    assert started[0]["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == "0"


def test_down_before_any_up(tmp_path):
    said = []

    Stack(tmp_path / "nothing-here", tmp_path, Ports()).down(said.append)

    assert said == []


# --- clients


def test_a_stack_that_is_down_is_not_used(home, tmp_path):
    before = dict(os.environ)

    assert not use_stack(Stack(home, tmp_path, Ports()))
    assert dict(os.environ) == before


def test_the_token_is_made_once_and_for_the_owner_only(home, tmp_path):
    stack = Stack(home, tmp_path, Ports())

    stack._make_token()
    token = (home / "ray_token").read_text()
    stack._make_token()

    assert (home / "ray_token").read_text() == token
    assert len(token) == 64
    assert (home / "ray_token").stat().st_mode & 0o077 == 0


def test_a_taken_port_is_an_error_with_the_remedy(home, tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        with pytest.raises(StackError, match=rf"port {port} is taken by another program: .*RLHF_MLFLOW_PORT"):
            Stack(home, tmp_path, Ports(mlflow=port))._start_server("mlflow")


LISTENER = """
import socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("ours", [True, False])
def test_what_a_killed_part_left_on_its_port_is_ended_and_nothing_else(home, tmp_path, monkeypatch, ours):
    mark = {"RLHF_HOME": str(home if ours else tmp_path)}
    command = [sys.executable, "-c", LISTENER]
    left = subprocess.Popen(command, env={**os.environ, **mark}, stdout=subprocess.PIPE, text=True)
    stack = Stack(home, tmp_path, Ports(mlflow=int(left.stdout.readline())))
    started = []
    monkeypatch.setattr(Stack, "_spawn", lambda self, name, command: started.append(name))

    with contextlib.nullcontext() if ours else pytest.raises(StackError, match="taken by another program"):
        stack._start_server("mlflow")

    assert (started, left.poll() is None) == ((["mlflow"], False) if ours else ([], True))
    left.kill()
    left.wait()


def test_a_command_that_fails_is_an_error_with_its_output(home, tmp_path):
    with pytest.raises(StackError, match="work pool: .*failed:\nno way"):
        Stack(home, tmp_path, Ports())._run("work pool", [sys.executable, "-c", "import sys; sys.exit('no way')"])
