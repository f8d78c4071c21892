"""The process that runs reward functions: ``python -m rlhf_core.rewards.worker CHANNEL LIFELINE`` (two descriptors).

::

    pool ──{"functions": [...]}──▶ worker        once; answered by {"group_wise": [...]} or {"error": "..."}
    pool ──{"function": 0, "queries": [...], ...}──▶ worker      answered by {"rows": [...]} or {"raised": "..."}

Stdout and stderr belong to the user's code: messages have a channel of their own. The process leads its own session, so
that one signal ends it together with whatever it started.
"""

from __future__ import annotations

import signal
import socket
import sys
from dataclasses import astuple
from typing import Any

from rlhf_core.errors import ConfigError
from rlhf_core.processes.lifeline import hold_lifeline
from rlhf_core.processes.printed import flush, print_safely
from rlhf_core.processes.wire import encode, receive
from rlhf_core.rewards.answers import to_rows
from rlhf_core.rewards.contract import FunctionSpec
from rlhf_core.rewards.functions import LoadedFunction, load_function
from rlhf_core.user_file import describe


def main() -> None:
    """Load the functions, then run one call after the other until the pool closes the channel."""
    print_safely()
    hold_lifeline(int(sys.argv[2]))
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    functions = _load(receive(channel), channel)
    while (call := receive(channel)) is not None:
        reply = run(functions[call["function"]], call)
        flush()
        channel.sendall(encode(reply))


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
