"""The tool ``python`` against code that means harm. Real processes, each a few tens of milliseconds."""

import ctypes
import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlhf_core.agents.tools import sandbox
from rlhf_core.agents.tools.confined import landlock, seccomp
from rlhf_core.agents.tools.sandbox import SandboxLimits, check_sandbox, run_python
from rlhf_core.errors import AgentError, ConfigError

pytestmark = pytest.mark.agents

LIMITS = SandboxLimits(seconds=20, memory_mib=256, disk_mib=1)
BRIEF = SandboxLimits(seconds=1, memory_mib=256, disk_mib=1)
FORBIDDEN = "PermissionError: [Errno 1] Operation not permitted"


def last_line(code, limits=LIMITS):
    result = run_python(code, limits)
    return result.output.splitlines()[-1] if result.output else ""


def test_this_machine_can_hold_code():
    check_sandbox(LIMITS)


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("6 * 7", "42"),
        ("print('a')\nx = 3\nx + 1", "a\n4"),
        ("x = 3", ""),
        ("None", ""),
        ("print('ä € 😀')", "ä € 😀"),
        ("import math, json, re, random, datetime, decimal, statistics, itertools\nmath.sqrt(16)", "4.0"),
        ("import asyncio\nasync def f():\n  await asyncio.sleep(0)\n  return 5\nasyncio.run(f())", "5"),
        ("open('note', 'w').write('hi')\nopen('note').read()", "'hi'"),
        ("import sys\nsys.exit()", ""),
        ("__name__", "'__main__'"),
        ("print('\\ud800')", "\\ud800"),
        ("import sys\nprint('gone', file=sys.stderr)", "gone"),
    ],
)
def test_what_it_prints_and_its_last_value(code, output):
    result = run_python(code, LIMITS)

    assert (result.output, result.failed) == (output, False)


def test_an_error_is_the_end_of_the_traceback():
    result = run_python("def f(x):\n    return 1 / x\nprint('before')\nf(0)", LIMITS)

    assert result.failed
    assert result.output.splitlines()[0] == "before"
    assert '  File "<python>", line 2, in f\n    return 1 / x' in result.output
    assert result.output.endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("x = ", "SyntaxError: invalid syntax"),
        ("import sys\nsys.exit('no')", "no"),
        ("input()", "EOFError: EOF when reading a line"),
        ("def f(): return f()\nf()", "RecursionError: maximum recursion depth exceeded"),
        ("import numpy", "ModuleNotFoundError: No module named 'numpy'"),
        ("import rlhf_core", "ModuleNotFoundError: No module named 'rlhf_core'"),
        ("raise BaseException('odd')", "BaseException: odd"),
        ("import ctypes\nctypes.string_at(0)", "Stopped: ended by signal 11"),
        ("import sys\nsys.stdout.close()\nprint(1)", ""),
        ("compile('('*5000, 'x', 'exec')", "SyntaxError: too many nested parentheses"),
    ],
)
def test_errors_of_the_code(code, end):
    result = run_python(code, LIMITS)

    assert result.failed
    assert result.output.endswith(end)


def test_the_text_of_an_error_names_no_path_of_this_machine():
    output = run_python("import json\njson.loads('{')", LIMITS).output

    assert output.endswith(
        "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
    )
    assert "/" not in output


def test_the_same_code_prints_the_same():
    code = "print({'a', 'b', 'c', 'd', 'e'})\nhash('x')"

    assert run_python(code, LIMITS) == run_python(code, LIMITS)


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["while True: pass", "import time\ntime.sleep(99)", "10**10**9"])
def test_code_that_does_not_end_is_stopped(code):
    start = time.monotonic()
    result = run_python(f"print('a')\n{code}", BRIEF)

    assert result.failed
    # Which of the two comes first depends on what else the machine does.
    assert result.output in (
        "a\nStopped: not finished after 1 s",
        "a\nStopped: the limit on processor time was reached",
    )
    assert time.monotonic() - start < 10


def test_signals_cannot_be_used_to_stay_alive():
    code = "import signal\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass"

    assert last_line(code, BRIEF) == "Stopped: not finished after 1 s"


@pytest.mark.parametrize("code", ["'x' * 10**12", "l = []\nwhile True: l.append('x' * 10**6)", "bytearray(2**31)"])
def test_a_memory_bomb_is_a_memory_error(code):
    result = run_python(code, LIMITS)

    assert result.failed
    assert (result.output.splitlines() or [""])[-1] in ("MemoryError", "")  # there may be no memory left to say so


def test_a_zip_bomb_is_a_memory_error():
    small = SandboxLimits(seconds=20, memory_mib=64, disk_mib=1)
    code = (
        "import zlib\nc = zlib.compressobj(1)\nz = b''.join(c.compress(bytes(10**6)) for _ in range(80)) + c.flush()\n"
        "print(len(z) < 10**6)\nzlib.decompress(z)"
    )

    lines = run_python(code, small).output.splitlines()

    assert (lines[0], lines[-1][:11]) == ("True", "MemoryError")


def test_endless_output_is_stopped():
    result = run_python("while True: print('y' * 1000)", LIMITS)

    assert result.output.endswith(f"Stopped: more than {sandbox.MAX_OUTPUT} bytes of output")
    assert len(result.output) < 2 * sandbox.MAX_OUTPUT


def test_a_file_has_a_limit():
    assert last_line("open('a', 'wb').write(bytes(2**21))") == "OSError: [Errno 27] File too large"


@pytest.mark.parametrize("size", [0, 10**6])
def test_files_together_have_a_limit(size):
    code = f"i = 0\nwhile True:\n  open(str(i), 'wb').write(bytes({size})); i += 1"

    assert last_line(code) == f"Stopped: more than 1 MiB in files, or more than {sandbox.MAX_FILES} files"


# --- what is out of reach --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "import socket\nsocket.socket()",
        "import socket\nsocket.create_connection(('127.0.0.1', 1))",
        "import socket\nsocket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)",
        "import socket\nsocket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
        "import os\nos.fork()",
        "import os\nos.posix_spawn('/bin/true', ['true'], {})",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.execv('/bin/true', ['true'])",
        "import os\nos.kill(os.getppid(), 9)",
        "import os\nos.kill(-1, 9)",
        "import os\nos.killpg(0, 9)",
        "import fcntl, os\nfcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
        "import fcntl\nfcntl.fcntl(0, 10, 9)",
        "import os\nos.setsid()",
        "import os\nos.sched_setaffinity(os.getppid(), {0})",
        "import os\nos.nice(-1) if os.getuid() == 0 else os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
        "import os\nos.memfd_create('a')",
        "import resource, os\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    ],
)
def test_network_and_processes_are_forbidden(code):
    assert last_line(code).startswith("PermissionError: [Errno 1]"), last_line(code)


def test_a_thread_cannot_be_started():
    assert (
        last_line("import threading\nthreading.Thread(target=print).start()") == "RuntimeError: can't start new thread"
    )


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "/proc/1/environ", "/proc/self/environ", "/proc/self/maps", "/sys/kernel/uevent_seqnum", __file__],
)
def test_files_outside_cannot_be_read(path):
    assert last_line(f"open({path!r}).read()") == f"PermissionError: [Errno 13] Permission denied: {path!r}"


def test_folders_outside_cannot_be_listed():
    assert last_line("import os\nos.listdir('..')") == "PermissionError: [Errno 13] Permission denied: '..'"


def test_the_environment_is_empty_of_ours(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "s3cret")

    output = run_python("import os\nprint(sorted(os.environ))", LIMITS).output

    assert "SOME_TOKEN" not in output
    assert "HOME" in output


@pytest.mark.parametrize(
    "code",
    [
        "open({path!r}, 'w')",
        "open({path!r}, 'a')",
        "import os\nos.remove({path!r})",
        "import os\nos.rename({path!r}, 'mine')",
        "import os\nos.rename('mine', {path!r})",
        "import os\nos.chmod({path!r}, 0)",
        "import os\nos.truncate({path!r}, 0)",
        "import os\nos.utime({path!r})",
        "import os\nos.link({path!r}, 'mine')",
        "import os\nos.symlink({path!r}, 'mine'); open('mine', 'w')",
        "import os\nos.setxattr({path!r}, 'user.a', b'1')",
        "import os\nos.mkdir('folder')",
        "import os\nos.chroot('.')",
        "import os\nos.mkfifo('pipe')",
    ],
)
def test_nothing_outside_can_be_altered(code, tmp_path):
    path = tmp_path / "precious"
    path.write_text("kept")
    before = path.stat()

    output = last_line("open('mine', 'w').close()\n" + code.format(path=str(path)))

    assert output.startswith(("PermissionError: ", "OSError: [Errno 18]")), output  # 18: another device
    assert path.read_text() == "kept"
    assert (path.stat().st_mode, path.stat().st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


@pytest.mark.parametrize(
    "call",
    [
        "shmctl({shared}, 0, 0)",
        "semctl({lock}, 0, 0)",
        "msgrcv({queue}, ctypes.create_string_buffer(64), 32, 0, 0o4000)",
        "inotify_add_watch(libc.inotify_init1(0), b'/tmp', 0xfff)",
        "fallocate(0, 0, 0, 4096)",
    ],
)
def test_what_other_processes_share_is_out_of_reach(call, kernel_objects):
    """System V names need no opening: their ids are small numbers. ``fallocate`` fills a disk at once."""
    code = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"

    output = run_python(f"{code}print(libc.{call.format(**kernel_objects)}, ctypes.get_errno())", LIMITS).output

    assert output == f"-1 {errno.EPERM}"


@pytest.fixture
def kernel_objects():
    """Shared memory, a semaphore and a message queue of this process, by id."""
    libc, private, made = ctypes.CDLL(None), 0, 0o1600
    found = {
        "shared": libc.shmget(private, 4096, made),
        "lock": libc.semget(private, 1, made),
        "queue": libc.msgget(private, made),
    }
    yield found
    gone = (libc.shmctl(found["shared"], 0, 0), libc.semctl(found["lock"], 0, 0), libc.msgctl(found["queue"], 0, 0))
    assert gone == (0, 0, 0)


def test_no_descriptor_of_ours_is_open(tmp_path):
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        code = f"import os\nos.fstat({file.fileno()})"
        assert last_line(code) == "OSError: [Errno 9] Bad file descriptor"


def test_even_root_has_no_capability():
    code = (
        "import ctypes\nclass H(ctypes.Structure): _fields_ = [('v', ctypes.c_uint32), ('p', ctypes.c_int)]\n"
        "d = (ctypes.c_uint32 * 6)()\nctypes.CDLL(None).capget(ctypes.byref(H(0x20080522, 0)), d)\nlist(d)"
    )
    assert last_line(code) == "[0, 0, 0, 0, 0, 0]"


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(psutil.Process().children(recursive=True))

    for code in ("open('a', 'w').write('x')", "while True: pass", "import os\nos._exit(0)"):
        run_python(code, BRIEF)

    assert list(tmp_path.iterdir()) == []
    assert set(psutil.Process().children(recursive=True)) == before


def test_it_dies_with_the_process_that_asked():
    """The limit of the code is a minute; the process that waits for it is killed in the meantime."""
    script = (
        "from rlhf_core.agents.tools.sandbox import SandboxLimits, run_python\n"
        "run_python('import time; time.sleep(60)', SandboxLimits(seconds=60, memory_mib=256, disk_mib=1))"
    )
    asker = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        while not (children := psutil.Process(asker.pid).children()):
            time.sleep(0.05)
        time.sleep(1)
    finally:
        asker.kill()
        asker.wait()
    [child] = children
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


# --- options, and machines that cannot -------------------------------------------------------------------------------


def test_packages_can_be_allowed():
    limits = SandboxLimits(seconds=60, memory_mib=1024, disk_mib=1, packages=True)

    assert last_line("import numpy\nint(numpy.arange(4).sum())", limits) == "6"
    assert last_line("import socket\nsocket.socket()", limits) == FORBIDDEN


def test_a_machine_without_landlock_is_refused_unless_that_is_allowed(monkeypatch, tmp_path):
    """The kernel is asked in the sandbox's own process: so a copy of what runs there, which finds no Landlock."""
    here = Path(sandbox.__file__).parent / "confined"
    copy = tmp_path / "confined"
    copy.mkdir()
    for file in here.glob("*.py"):
        (copy / file.name).write_text(file.read_text().replace("_CREATE, _ADD_RULE", "_, _ADD_RULE"))
    text = (copy / "landlock.py").read_text()
    (copy / "landlock.py").write_text(text.replace("def version", "_CREATE = 9999\n\n\ndef version"))
    monkeypatch.setattr(sandbox, "_HERE", str(tmp_path))

    with pytest.raises(
        ConfigError, match="agent.tools names python.*the kernel has no Landlock.*agent.sandbox.open_files"
    ):
        check_sandbox(LIMITS)

    open_files = SandboxLimits(seconds=20, memory_mib=256, disk_mib=1, open_files=True)
    check_sandbox(open_files)
    assert last_line("open('/etc/passwd').read(0)", open_files) == "''"
    assert last_line("import socket\nsocket.socket()", open_files) == FORBIDDEN


def test_limits_that_nothing_can_keep_are_found_at_the_start():
    """Over before anybody looks: the code may have printed its result, and is stopped all the same."""
    with pytest.raises(
        ConfigError, match=r"agent.tool_timeout=1e-09 it cannot compute 6 \* 7: '.*Stopped: not finished"
    ):
        check_sandbox(SandboxLimits(seconds=1e-9, memory_mib=64, disk_mib=1))


def test_a_full_machine_is_no_fault_of_the_code(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")

    with pytest.raises(AgentError, match="the sandbox of the tool python cannot be run: .*No such file"):
        run_python("1", LIMITS)


def test_the_filter_knows_two_kinds_of_machine():
    for machine in ("x86_64", "aarch64"):
        assert len(seccomp.program(machine)) % 8 == 0
    with pytest.raises(OSError, match="no system call filter for 'riscv64'"):
        seccomp.program("riscv64")


def test_the_numbers_are_those_of_the_headers():
    """Where the kernel's headers are installed: every number of the table is that of the call."""
    found = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm-generic/unistd.h")
    if not all(path.exists() for path in found):
        pytest.skip("no kernel headers here")
    import re

    x86 = dict(re.findall(r"#define __NR_(\w+)\s+(\d+)", found[0].read_text()))
    arm = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", found[1].read_text()))
    by_value = {name: numbers for name, (numbers, _) in (seccomp.REFUSED_VALUES | seccomp.ALLOWED_VALUES).items()}
    for name, (on_x86, on_arm) in (seccomp.REFUSED | by_value).items():
        assert (str(on_x86), None if on_arm is None else str(on_arm)) == (x86[name], arm.get(name)), name


def test_landlock_is_here():
    """Else the tests above would have failed for want of it, with a longer story."""
    assert landlock.version() > 0
