"""The process that runs reward functions: ``python -m rlhf_core.rewards.worker CHANNEL LIFELINE`` (two descriptors).

::

    pool ──{"functions": [...]}──▶ worker        once; answered by {"group_wise": [...]} or {"error": "..."}
    pool ──{"function": 0, "queries": [...], ...}──▶ worker      answered by {"rows": [...]} or {"raised": "..."}

Stdout and stderr belong to the user's code: messages have a channel of their own. The process leads its own session, so
that one signal ends it together with whatever it started.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import select
import signal
import socket
import sys
from dataclasses import astuple
from typing import Any

from rlhf_core.errors import ConfigError
from rlhf_core.rewards.answers import to_rows
from rlhf_core.rewards.contract import FunctionSpec
from rlhf_core.rewards.functions import LoadedFunction, load_function
from rlhf_core.rewards.wire import encode, receive
from rlhf_core.user_file import describe


def main() -> None:
    """Load the functions, then run one call after the other until the pool closes the channel."""
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        # what was printed before a crash must not be lost, and printing odd text must not be an error of the sample
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    hold_lifeline(int(sys.argv[2]))
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    functions = _load(receive(channel), channel)
    while (call := receive(channel)) is not None:
        channel.sendall(encode(run(functions[call["function"]], call)))


def hold_lifeline(fd: int) -> None:
    """Let the kernel kill this process group when the other end of the pipe closes: the controller is gone.

    No thread could do that: a runaway regular expression or C extension holds the interpreter's lock for ever.
    """
    os.set_inheritable(fd, False)
    fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | fcntl.FASYNC)
    if select.select([fd], [], [], 0)[0]:
        sys.exit("the controller was gone before this worker began")


def run(function: LoadedFunction, call: dict[str, Any]) -> dict[str, Any]:
    """The reply to one call."""
    try:
        try:
            rows = to_rows(function(call), len(call["queries"]))
        finally:
            _disarm()
    except BaseException as error:  # noqa: BLE001 - whatever it was, SystemExit included, it is that call's result
        return {"raised": describe(error)}
    return {"rows": [astuple(row) for row in rows]}


def _load(request: Any, channel: socket.socket) -> list[LoadedFunction]:
    functions, problems = [], []
    for spec in request["functions"]:
        try:
            functions.append(load_function(FunctionSpec(**spec)))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        channel.sendall(encode({"error": "\n".join(problems)}))
        sys.exit(1)
    channel.sendall(encode({"group_wise": [function.group_wise for function in functions]}))
    return functions


def _disarm() -> None:
    """A function's alarm must not go off in the next call."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


if __name__ == "__main__":
    main()
