"""A whole stack of real processes that a test may kill one by one: Prefect server and worker, MLflow, Ray, an S3 server.

Started, and brought back, as a user does it: ``rlhf up``.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
from prefect_http import csrf_headers
from s3_server import S3Server

from rlhf_cli.stack import Ports, free_port
from rlhf_core.storage import RunStore, holder

ROOT = Path(__file__).resolve().parents[2]
HOLDS = Path(__file__).with_name("holds")
STACKS = ("PREFECT_", "MLFLOW_", "RAY_", "RLHF_", "AWS_")  # of another stack, if the tests run beside one
COMMAND_SECONDS = 900.0
HTTP_SECONDS = 60.0
BUSY = 503


class FaultStack:
    """``start``, then kill whatever has a name in ``KILLS``, ``bring_back`` and at last ``stop``."""

    def __init__(self, folder: Path, on_s3: bool = True) -> None:
        self.home = folder / "home"
        self.holds = folder / "holds"
        self.holds.mkdir(parents=True)
        self.s3 = S3Server(folder / "s3") if on_s3 else None
        self._ports = Ports(*(free_port() for _ in range(3)))
        self._root = folder / "runs"

    @property
    def root(self) -> str:
        """``storage.root`` of the runs."""
        return str(self._root) if self.s3 is None else f"s3://{self.s3.bucket}/runs"

    @property
    def environment(self) -> dict[str, str]:
        """Of every command a user of this stack gives."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(STACKS)}
        path = os.pathsep.join(filter(None, [str(HOLDS), kept.get("PYTHONPATH")]))
        ports = {f"RLHF_{name.upper()}_PORT": str(port) for name, port in vars(self._ports).items()}
        return {
            **kept,
            **({} if self.s3 is None else self.s3.environment),
            **ports,
            "RLHF_HOME": str(self.home),
            "RLHF_HOLDS": str(self.holds),
            "PREFECT_API_URL": self._api,
            "PYTHONPATH": path,
            "RAY_worker_niceness": "0",  # Ray gives its workers way to whatever else the machine does: tests would wait
            "COLUMNS": "200",
        }

    def start(self) -> None:
        """Everything."""
        if self.s3 is not None:
            self.s3.start()
        self.up()

    def stop(self) -> None:
        """Everything, by ``rlhf down``; then whatever is left of it."""
        with contextlib.suppress(subprocess.SubprocessError):
            self.rlhf("down")
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.s3 is not None:
            self.s3.stop()

    def up(self) -> None:
        """``rlhf up``: start what does not run."""
        self.rlhf("up")

    def rlhf(self, *arguments: str) -> str:
        """A command of ours; its output."""
        return self._command("-c", "from rlhf_cli.main import main; main()", *arguments)

    def prefect(self, *arguments: str) -> str:
        """A command of Prefect's; its output."""
        return self._command("-m", "prefect", *arguments)

    def store(self, run_id: str) -> RunStore:
        """The log of a run; patient for seconds only."""
        return RunStore(run_id, self.root, timeout=5.0)

    # --- flow runs ----------------------------------------------------------------------------------------------------

    def submit(self, parameters: dict[str, object]) -> str:
        """As ``prefect deployment run rlhf/train``. The id of the flow run."""
        deployment = self._http("GET", "/deployments/name/rlhf/train")["id"]
        body = {"parameters": parameters, "name": parameters["run_id"], "state": {"type": "SCHEDULED"}}
        return str(self._http("POST", f"/deployments/{deployment}/create_flow_run", body)["id"])

    def state(self, flow_run_id: str) -> dict[str, object] | None:
        """Of a flow run; None while the server is away, or too busy."""
        try:
            return dict(self._http("GET", f"/flow_runs/{flow_run_id}")["state"])
        except httpx.HTTPError:
            return None

    def errors(self, flow_run_id: str) -> str:
        """What its log says in red."""
        wanted = {"logs": {"flow_run_id": {"any_": [flow_run_id]}, "level": {"ge_": 30}}, "sort": "TIMESTAMP_DESC"}
        return "\n".join(log["message"][:1500] for log in self._http("POST", "/logs/filter", {**wanted, "limit": 15}))

    def tracked_iterations(self, run_id: str) -> int:
        """How many iterations of a run MLflow has been told."""
        mlflow = f"http://127.0.0.1:{self._ports.mlflow}/api/2.0/mlflow"
        name = {"experiment_name": "rlhf"}
        found = httpx.get(f"{mlflow}/experiments/get-by-name", params=name, timeout=HTTP_SECONDS).json()
        body = {
            "experiment_ids": [found["experiment"]["experiment_id"]],
            "filter": f"tags.`rlhf.run_id` = '{run_id}'",
        }
        (run,) = httpx.post(f"{mlflow}/runs/search", json=body, timeout=HTTP_SECONDS).json()["runs"]
        return int({tag["key"]: tag["value"] for tag in run["data"]["tags"]}["rlhf.logged_iterations"])

    # --- victims ------------------------------------------------------------------------------------------------------

    def processes(self, title: str = "") -> list[psutil.Process]:
        """Of this stack, S3 excepted: those whose command line holds ``title``."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RLHF_HOME") == str(self.home) and process.status() != psutil.STATUS_ZOMBIE:
                    found += [process] if title in title_of(process) else []
        return found

    def server(self, name: str) -> list[psutil.Process]:
        """The processes of one part of the stack, as ``rlhf up`` recorded it, without what works for runs."""
        first = psutil.Process(json.loads((self.home / "stack.json").read_text())["pids"][name])
        return [first, *first.children(recursive=True)]

    def flow(self, run_id: str) -> list[psutil.Process]:
        """The process of a run: who holds its lease."""
        held = holder(self.store(run_id))
        assert held is not None
        return [psutil.Process(held.owner.pid)]

    def _http(self, method: str, path: str, body: object = None) -> dict[str, object]:
        def answer() -> httpx.Response | None:
            try:
                headers = csrf_headers(self._api) if method == "POST" else {}
            except httpx.HTTPStatusError:
                return None
            found = httpx.request(method, f"{self._api}{path}", json=body, headers=headers, timeout=HTTP_SECONDS)
            return None if found.status_code == BUSY else found  # nothing was done: Prefect's own client asks again too

        found = wait_until(answer, COMMAND_SECONDS, f"Prefect answers {path}", pause=1.0)
        found.raise_for_status()
        return found.json()  # type: ignore[no-any-return]

    def _command(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{arguments[-3:]}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    @property
    def _api(self) -> str:
        return f"http://127.0.0.1:{self._ports.prefect}/api"


def title_of(process: psutil.Process) -> str:
    """As the process shows itself; "" once it is gone.

    vLLM's engine process is named here where it could not name itself: setproctitle gives up when the first variable of a
    process's environment has been set again, and which one is the first nobody decides.
    """
    try:
        line = " ".join(process.cmdline())
        above = process.parent() if "multiprocessing.spawn" in line else None
        return "VLLM::EngineCore" if above and above.cmdline()[0].startswith("ray::EngineWorker") else line
    except psutil.Error:
        return ""


def kill(processes: list[psutil.Process]) -> None:
    """SIGKILL, to all of them before any can act on the death of another."""
    assert processes, "nobody to kill"
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def wait_until(condition, seconds, what, pause=0.1):
    """``condition()``'s first answer that is not None or False."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"within {seconds:g} s: {what}"
        time.sleep(pause)
    return answer
