"""The ``rlhf`` command on a stack of the tests, and what that stack leaves behind."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]


def environment_of(home):
    """Of a stack on free ports."""
    from rlhf_cli.stack import free_port

    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_", "RAY_"))},
        "RLHF_HOME": str(home),
        "RLHF_PREFECT_PORT": str(free_port()),
        "RLHF_MLFLOW_PORT": str(free_port()),
        "RLHF_RAY_PORT": str(free_port()),
        "COLUMNS": "200",
    }
    environment["PREFECT_API_URL"] = f"http://127.0.0.1:{environment['RLHF_PREFECT_PORT']}/api"
    return environment


def rlhf(environment, *arguments):
    command = [sys.executable, "-c", "from rlhf_cli.main import main; main()", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False)


def processes_of(environment):
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RLHF_HOME") == environment["RLHF_HOME"] and process.status() != "zombie":
                found.append(process.cmdline()[:4])
        except psutil.Error:
            continue
    return found
