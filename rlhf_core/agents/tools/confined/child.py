"""The sandbox's process: gives up everything it does not need, then runs the code it was given.

::

    {"code", "parent", "folder", "readable", "memory", "disk", "cpu", "open_files"}, marshalled, on stdin
        ─▶ limits ─▶ no capabilities ─▶ Landlock ─▶ seccomp ─▶ READY on stdout ─▶ the code, its output, its last value
                                 └── refused: the reason on stdout, exit code 1, no READY

One process, one thread: it can start no other, so ending it ends everything.
"""

from __future__ import annotations

import builtins
import ctypes
import marshal
import os
import resource
import struct
import sys

from . import landlock, seccomp

TYPE_CHECKING = False  # the module typing takes longer to import than all of this takes to run
if TYPE_CHECKING:
    from typing import Any

READY = "\x00ready\n"
FILE_NAME = "<python>"
MAX_OPEN_FILES = 32
TRACEBACK_LINES = 8

_PR_SET_PDEATHSIG, _SIGKILL = 1, 9
_CAPABILITY_VERSION = 0x20080522
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_ONLY_AST = 0x400  # ast.PyCF_ONLY_AST


def main() -> None:
    """Read the order, confine, run, end the process."""
    order = marshal.load(sys.stdin.buffer)
    try:
        confine(order)
    except OSError as error:
        say(f"{error}\n")
        os._exit(1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # code that is stopped has printed something
    say(READY)
    try:
        failed = run(order["code"])
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001  the code closed or replaced what is printed to
        failed = True
    os._exit(int(failed))  # no exit handlers: the code has had its say


def confine(order: dict[str, Any]) -> None:
    """Give up files, network, other processes and the right to anything more.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(_SIGKILL))
    if os.getppid() != order["parent"]:
        raise OSError("the process that asked for this call is gone")
    set_limits(order["memory"], order["disk"], order["cpu"])
    # root without capabilities is a user like others, and its files are ruled by Landlock
    header, none = struct.pack("Ii", _CAPABILITY_VERSION, 0), bytes(24)
    if libc.capset(ctypes.create_string_buffer(header, len(header)), ctypes.create_string_buffer(none, len(none))):
        raise OSError(ctypes.get_errno(), "the capabilities cannot be dropped")
    seccomp.forbid_new_privileges()
    if not order["open_files"] or landlock.version():
        landlock.restrict(order["readable"], _DEVICES, order["folder"])
    seccomp.install()


def set_limits(memory: int, disk: int, cpu: int) -> None:
    """Limits of the kernel: address space and file size in bytes, seconds of the processor."""
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_FSIZE, disk, disk),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES, MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        most = resource.getrlimit(kind)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))


def run(code: str) -> bool:
    """Run the code as a program; print the value of its last line if that is an expression. Returns whether it failed."""
    import _ast  # a part of the interpreter; ast would import much else

    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    try:
        tree = compile(code, FILE_NAME, "exec", _ONLY_AST, dont_inherit=True)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
        exec(compile(tree, FILE_NAME, "exec", dont_inherit=True), namespace)  # noqa: S102  what this process is for
        if last is not None:
            expression = compile(_ast.Expression(last.value), FILE_NAME, "eval", dont_inherit=True)
            value = eval(expression, namespace)  # noqa: S307
            if value is not None:
                say(f"{value!r}\n")
    except SystemExit as end:
        if isinstance(end.code, str):
            say(f"{end.code}\n")
        return end.code not in (None, 0)
    except BaseException as error:  # noqa: BLE001  whatever it was, it is the result
        say(f"{last_lines(error, code)}\n")
        return True
    return False


def say(text: str) -> None:
    """Print."""
    sys.stdout.write(text)
    sys.stdout.flush()


def last_lines(error: BaseException, code: str) -> str:
    """The end of the traceback: of its frames only those of the code, which are the same on every machine."""
    import linecache
    import traceback

    traceback.clear_frames(error.__traceback__)  # after a MemoryError, what they hold is needed to say so
    linecache.cache[FILE_NAME] = (len(code), None, [f"{line}\n" for line in code.split("\n")], FILE_NAME)
    report = traceback.TracebackException.from_exception(error)
    report.stack[:] = [frame for frame in report.stack if frame.filename == FILE_NAME]
    return "\n".join("".join(report.format()).rstrip().splitlines()[-TRACEBACK_LINES:])
