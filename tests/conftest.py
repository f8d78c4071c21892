"""Fixtures that many tests share. Servers, clusters and engines are started once per session."""

import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from s3_server import S3Server

# Before any test imports torch, Ray or Prefect.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("PYTHONUNBUFFERED", None)  # users do not set it, and it hides what is lost in a buffer
for name in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI", "PREFECT_API_URL", "RLHF_HOME"):
    os.environ.pop(name, None)  # of a stack that happens to run on this machine
for name in [name for name in os.environ if name.startswith("AWS_")]:
    os.environ.pop(name)  # of another store

import rlhf_core.cluster  # noqa: E402, F401  says how Ray authenticates, which Ray reads once, as a test imports it

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """Folder of the built-in random model, made once per session."""
    from rlhf_core.data.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=0)


@pytest.fixture(scope="session")
def home(tmp_path_factory) -> Path:
    """$RLHF_HOME of the session: built-in models are made in it once."""
    folder = tmp_path_factory.mktemp("home")
    os.environ["RLHF_HOME"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def prefect_api(home) -> str:
    """The API of a real Prefect server; flows of this process run against it."""
    from rlhf_cli.stack import Ports, Stack, free_port

    stack = Stack(home / "prefect-only", ROOT, Ports(prefect=free_port()))
    keep = {name: value for name, value in stack.environment.items() if name.startswith(("PREFECT_", "DO_NOT"))}
    os.environ.update(keep)
    (home / "prefect-only").mkdir(exist_ok=True)
    with (home / "prefect.log").open("wb") as log:
        command = [
            sys.executable,
            "-m",
            "rlhf_cli.prefect_server",
            "server",
            "start",
            "--port",
            str(stack.ports.prefect),
        ]
        server = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=os.environ, start_new_session=True)
    wait_for_url(f"{stack.prefect_url}/api/health")
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: f"{stack.prefect_url}/api"}):
        yield f"{stack.prefect_url}/api"
    server.terminate()
    server.wait(20)


@pytest.fixture(scope="session")
def mlflow_uri(home) -> str:
    """A real MLflow server."""
    from rlhf_cli.stack import free_port

    port = free_port()
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{home / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(home / "artifacts")]
    with (home / "mlflow.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    wait_for_url(f"http://127.0.0.1:{port}/health")
    yield f"http://127.0.0.1:{port}"
    os.killpg(server.pid, 15)
    server.wait(60)


@pytest.fixture(scope="session")
def s3(tmp_path_factory) -> S3Server:
    """A real S3 server, whose address and keys are in the environment from then on. Leave it running."""
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        os.environ.update(server.environment)
        yield server
        for name in server.environment:
            os.environ.pop(name, None)


@pytest.fixture(scope="session")
def ray_cluster(home, s3) -> None:
    """A Ray cluster of this process; the runs of a session share it. Its workers know of the S3 server."""
    from rlhf_core.cluster.connect import connect, disconnect

    connect(None)
    yield
    disconnect()


def wait_for_url(url: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            assert time.monotonic() < deadline, f"{url} did not answer within {seconds:g} s"
            time.sleep(0.2)
