"""The tool ``python``: runs code of the policy in a process that can reach nothing, and says what it printed.

::

    code ──▶ python -S in an empty environment and a folder of its own ──▶ confined.child gives up all rights ──▶ the code
                 │ too long, too much output, too many files: killed                                               │
                 └──────────────────── what it printed, the value of its last line, the end of its traceback ◀────┘

What holds it is the kernel: limits on processor, memory, file size and open files; a filter on system calls (no network,
no other process or thread, no signal); Landlock (only Python's own files can be read, only the folder written). None of
it needs a privilege. A machine whose kernel refuses is refused in ``check_sandbox``.
"""

from __future__ import annotations

import contextlib
import marshal
import math
import os
import select
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.agents.tools.confined.child import READY
from rlhf_core.errors import AgentError, ConfigError
from rlhf_core.telemetry import get_logger

logger = get_logger(__name__)

MAX_OUTPUT = 2**20  # bytes; code that prints more is stopped
MAX_FILES = 256
LOOK_SECONDS = 0.1  # between two looks at the folder
PIECE = 2**16
START_SECONDS = 30.0  # for starting Python, on a busy machine; the limit of the code counts from then on
# What Python reads while it runs.
_LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")),
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache"),
    *("/etc/localtime", "/usr/share/zoneinfo"),
)
_HERE = str(Path(__file__).resolve().parent)
_START = "import sys; sys.path.insert(0, sys.argv[1]); from confined.child import main; del sys.path[0]; main()"


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What one call may use."""

    seconds: float  # on the clock, and of the processor
    memory_mib: int
    disk_mib: int
    packages: bool = False  # those installed can be imported
    open_files: bool = False  # Landlock may be missing


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """What became of the code."""

    output: str
    failed: bool  # it raised, or was stopped; ``output`` ends with the reason


def check_sandbox(limits: SandboxLimits) -> None:
    """Run one line, under the same protection as the policy's code.

    Raises:
        ConfigError: this machine cannot hold the code.
    """
    try:
        result = run_python("6 * 7", limits)
    except AgentError as error:
        raise ConfigError(
            f"agent.tools names python, and this machine cannot run it safely: {error}; allow seccomp filters and Landlock in "
            "the container (Docker's default profile does), use a kernel of 5.13 or later with landlock in its list lsm=, "
            "set agent.sandbox.open_files=true if only Landlock is missing and code of the policy may read and write the "
            "files of this user, or remove the tool"
        ) from error
    if result.output != "42":
        raise ConfigError(
            f"agent.tools names python, but with agent.sandbox.memory_mib={limits.memory_mib} and "
            f"agent.tool_timeout={limits.seconds:g} it cannot compute 6 * 7: {result.output!r}; raise them"
        )


def run_python(code: str, limits: SandboxLimits) -> SandboxResult:
    """Run a program; see the module. Blocks until it ended, ``limits.seconds`` after its start at the latest.

    Raises:
        AgentError: there is no room for another process, or it could not be confined; the code did not run.
    """
    try:
        folder = tempfile.mkdtemp(prefix="rlhf-python-")
        try:
            with _started(code, folder, limits) as process:
                try:
                    return _watch(process, folder, limits)
                finally:
                    process.kill()  # it has no children: this ends everything
        finally:
            _delete(folder)
    except OSError as error:  # of this machine's; the code's own are part of what it prints
        raise AgentError(f"the sandbox of the tool python cannot be run: {error}") from error


def _started(code: str, folder: str, limits: SandboxLimits) -> subprocess.Popen[bytes]:
    with tempfile.TemporaryFile() as order:
        order.write(marshal.dumps(_order(code, folder, limits)))
        order.seek(0)
        flags = ["-B", "-P", *([] if limits.packages else ["-S"])]
        return subprocess.Popen(
            [sys.executable, *flags, "-s", "-c", _START, _HERE],
            stdin=order,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=_environment(folder),
        )


def _order(code: str, folder: str, limits: SandboxLimits) -> dict[str, object]:
    return {
        "code": code,
        "parent": os.getpid(),
        "folder": folder,
        "memory": limits.memory_mib * 2**20,
        "disk": limits.disk_mib * 2**20,
        "cpu": math.ceil(limits.seconds),
        "open_files": limits.open_files,
        "readable": [*_LIBRARIES, *(site.getsitepackages() if limits.packages else ())],
    }


def _environment(folder: str) -> dict[str, str]:
    """Nothing of ours; the same hashes in each call, and libraries that start no threads."""
    return {
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "PYTHONUTF8": "1",
        "PYTHONIOENCODING": "utf-8:backslashreplace",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def _watch(process: subprocess.Popen[bytes], folder: str, limits: SandboxLimits) -> SandboxResult:
    """Read until the process ends, or has to be stopped."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    ready, printed = READY.encode(), b""
    deadline, started, reason = time.monotonic() + START_SECONDS, False, ""
    while True:
        readable, _, _ = select.select([descriptor], [], [], max(0.0, min(LOOK_SECONDS, deadline - time.monotonic())))
        if readable:
            piece = os.read(descriptor, PIECE)
            if not piece:
                break
            printed += piece
        if not started and printed.startswith(ready):
            printed, started, deadline = printed[len(ready) :], True, time.monotonic() + limits.seconds
        if reason := _reason_to_stop(started, deadline, len(printed), folder, limits):
            break
    if reason:
        process.kill()
    text = printed.decode(errors="replace").replace("\x00", "\ufffd").strip("\n")
    code = process.wait()
    if not started:
        raise AgentError(f"the sandbox of the tool python did not start: {reason or text or f'exit code {code}'}")
    if not reason and code < 0:
        reason = "the limit on processor time was reached" if code == -24 else f"ended by signal {-code}"  # SIGXCPU
    if reason:
        return SandboxResult(f"{text}\nStopped: {reason}".lstrip("\n"), failed=True)
    return SandboxResult(text, failed=code != 0)


def _reason_to_stop(started: bool, deadline: float, printed: int, folder: str, limits: SandboxLimits) -> str:
    if time.monotonic() >= deadline:
        return f"not finished after {limits.seconds:g} s" if started else f"no answer in {START_SECONDS:g} s"
    if printed > MAX_OUTPUT:
        return f"more than {MAX_OUTPUT} bytes of output"
    num_files, size = _written(folder)
    if size > limits.disk_mib * 2**20 or num_files > MAX_FILES:
        return f"more than {limits.disk_mib} MiB in files, or more than {MAX_FILES} files"
    return ""


def _written(folder: str) -> tuple[int, int]:
    """Files in the folder, and their bytes on disk. Without Landlock there could be folders in it: they count as files."""
    num_files = size = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            num_files += 1
            with contextlib.suppress(FileNotFoundError):
                size += entry.stat(follow_symlinks=False).st_blocks * 512
            if num_files > MAX_FILES:
                break
    return num_files, size


def _delete(folder: str) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        logger.warning("the folder of a sandbox cannot be deleted: %s", error)
