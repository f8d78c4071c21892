"""The process that imports the user's file once and forks a process an episode: ``python -m ... CHANNEL LIFELINE``.

::

    controller ──{"entry": "module:function", "argument": ..., "late": false}──▶ template
                                  once; answered by {"loaded": seconds}, {"error": "..."} or {"threads": [...]}
    controller ──{"fork": 7} + channel, lifeline──▶ template
                                  answered by {"forked": 7, "pid": ...} + pidfd, or {"unforked": 7, "error": "..."}
    controller ◀──{"printed": 7, "text": "..."} ... {"exited": 7, "code": 0}── template

A message is one packet (SOCK_SEQPACKET), so descriptors travel with the message they belong to.

**One thread.** ``fork`` copies the calling thread only: a lock that another one holds stays locked in the child for ever. So
the libraries that start threads when they are imported are told not to (``ENVIRONMENT``), the threads are counted after the
import, and from then on only the code of this file runs here. A file that starts threads all the same is imported anew
in each child, which is forked before the import (``late``).

**Nothing is left behind.** When a child ends, however it did, its process group is killed before it is reaped, and so is what
had left the group: each child and the template adopt the orphans below them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import ConfigError
from rlhf_core.processes.descendants import adopt_orphans, child_pids, die_with_parent, other_threads
from rlhf_core.processes.lifeline import hold_lifeline, let_go
from rlhf_core.processes.printed import PrintedOutput, flush, print_safely
from rlhf_core.processes.serving import import_generators, serve
from rlhf_core.user_file import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Factory = Callable[[int], Any]

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # of pyarrow, which many libraries import
    "PYTHONHASHSEED": "0",  # a resumed run sees its sets in the same order
}
MAX_PACKET = 1 << 17  # bytes; less than the smallest send buffer that Linux gives a socket
OUTPUT_SECONDS = 1.0  # between two reports of what a child printed
END_SECONDS = 5.0  # in which killed processes are gone, unless they hang in the kernel


def main() -> None:
    """Load, then fork on request until the controller closes the channel."""
    print_safely()
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    lifeline = int(sys.argv[2])
    hold_lifeline(lifeline)
    packet = channel.recv(MAX_PACKET)
    if not packet:
        return
    request = json.loads(packet)
    loop = TemplateLoop(channel, lifeline, lambda: load(request["entry"], request["argument"]))
    reply = {"loaded": 0.0} if request["late"] else loop.load()
    channel.send(json.dumps(reply).encode())
    if "loaded" not in reply:
        return
    # Only code of this project runs here from now on: it will see the channel close, and has more to clean up than the
    # process group of which the kernel knows.
    let_go(lifeline)
    loop.run()


def load(entry: str, argument: Any) -> Factory:
    """Call what ``module:function`` names.

    Raises:
        ConfigError: it does, or code of the user's raised something else.
    """
    module, _, name = entry.partition(":")
    function = getattr(importlib.import_module(module), name)
    try:
        factory: Factory = function(argument)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"the agent cannot be loaded: {describe(error)}") from error
    return factory


@dataclass(slots=True, eq=False)
class _Child:
    """A process below this one."""

    pid: int
    pidfd: int
    number: int | None = None  # of the fork; None: an orphan that is being killed
    output: PrintedOutput | None = None


class TemplateLoop:
    """Waits for requests, exits and output, all in the one thread that may fork."""

    def __init__(self, channel: socket.socket, lifeline: int, load_now: Callable[[], Factory]) -> None:
        self._channel = channel
        self._lifeline = lifeline
        self._load = load_now
        self._children: dict[int, _Child] = {}  # by pid
        self._known: set[int] = set()  # children of the user's file: they belong to it, not to an episode
        self._report_at = 0.0
        self._selector = selectors.DefaultSelector()

    def load(self) -> dict[str, Any]:
        """Import the user's file here, so that every child has it; the reply to the controller."""
        started = time.monotonic()
        try:
            factory = self._load()
        except ConfigError as error:
            return {"error": str(error)}
        import_generators()
        if threads := other_threads():
            return {"threads": threads}
        self._load = lambda: factory
        flush()  # what is in a buffer at a fork would be printed twice
        self._known = child_pids()
        gc.collect()
        gc.freeze()  # a collection in a child must not touch, and so copy, the pages that all share
        return {"loaded": time.monotonic() - started}

    def run(self) -> None:
        """Until the controller closes the channel."""
        adopt_orphans()
        self._selector.register(self._channel, selectors.EVENT_READ, self._request)
        try:
            while self._channel.fileno() >= 0:
                self._turn(OUTPUT_SECONDS if self._unreported() else None)
        finally:
            self._end_all()

    def _end_all(self) -> None:
        for child in self._children.values():
            self._kill(child)
        deadline = time.monotonic() + END_SECONDS
        while self._children and time.monotonic() < deadline:
            self._turn(END_SECONDS)

    def _turn(self, timeout: float | None) -> None:
        for key, _ in self._selector.select(timeout):
            if self._selector.get_map().get(key.fd) is key:  # else closed by what was handled just before
                key.data()
        if time.monotonic() >= self._report_at:
            self._report_at = time.monotonic() + OUTPUT_SECONDS
            for child in self._unreported():
                self._report(child)

    # --- forking -----------------------------------------------------------------------------------------------------

    def _request(self) -> None:
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._channel, MAX_PACKET, 2, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:  # the controller ended before it had read everything
            packet, descriptors = b"", []
        if not packet:
            self._selector.unregister(self._channel)
            self._channel.close()
            return
        number = json.loads(packet)["fork"]
        try:
            child = self._fork(number, *descriptors)
        except OSError as error:
            self._tell({"unforked": number, "error": f"no process can be forked: {error}"})
        else:
            self._tell({"forked": number, "pid": child.pid}, [child.pidfd])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _fork(self, number: int, channel: int, lifeline: int) -> _Child:
        reading, writing = os.pipe()
        output = PrintedOutput(reading)
        try:
            pid = os.fork()
            if pid == 0:
                for stream in (1, 2):
                    os.dup2(writing, stream)
                os.close(writing)
                output.close()
                self._become_child(channel, lifeline)
            pidfd = os.pidfd_open(pid)
        except OSError:
            output.close()
            raise
        finally:
            os.close(writing)
        child = self._children[pid] = _Child(pid, pidfd, number, output)
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._ended(child))
        self._selector.register(reading, selectors.EVENT_READ, lambda: self._read(child))
        return child

    def _become_child(self, channel: int, lifeline: int) -> None:
        """The forked process, from here to its end."""
        code = 1
        try:
            os.setsid()
            hold_lifeline(lifeline)
            die_with_parent()  # code of the user's may close the lifeline
            adopt_orphans()
            self._forget_siblings()
            code = serve(socket.socket(fileno=channel), self._load)
        except BaseException as error:  # noqa: BLE001 - nothing may run on into the template's own code
            sys.stderr.write(f"{describe(error)}\n")
        finally:
            os._exit(code)  # without the exit handlers that the user's file registered in the template

    def _forget_siblings(self) -> None:
        """Close what belongs to the template: a child must not hold it open."""
        self._selector.close()
        self._channel.close()
        os.close(self._lifeline)
        for child in self._children.values():
            os.close(child.pidfd)
            if child.output:
                child.output.close()

    # --- output ------------------------------------------------------------------------------------------------------

    def _read(self, child: _Child) -> None:
        if child.output:
            child.output.read()
            if not child.output.open:
                self._unwatch(child.output)

    def _unwatch(self, output: PrintedOutput) -> None:
        if output.fd in self._selector.get_map():
            self._selector.unregister(output.fd)

    def _unreported(self) -> list[_Child]:
        return [child for child in self._children.values() if child.output and child.output.pending]

    def _report(self, child: _Child) -> None:
        if child.output and (text := child.output.take()):
            self._tell({"printed": child.number, "pid": child.pid, "text": text})

    # --- ends --------------------------------------------------------------------------------------------------------

    def _ended(self, child: _Child) -> None:
        """Kill what the child left behind, reap it, and tell."""
        self._kill(child)  # its group; before it is reaped: while it is a zombie, its group id cannot be reused
        _, status = os.waitpid(child.pid, 0)
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        del self._children[child.pid]
        self._kill_orphans()
        if child.output:
            child.output.read()
            self._report(child)
            self._unwatch(child.output)
            child.output.close()
            self._tell({"exited": child.number, "code": os.waitstatus_to_exitcode(status)})

    def _kill_orphans(self) -> None:
        for pid in child_pids() - self._known - self._children.keys():
            orphan = self._children[pid] = _Child(pid, os.pidfd_open(pid))
            self._selector.register(orphan.pidfd, selectors.EVENT_READ, lambda orphan=orphan: self._ended(orphan))
            self._kill(orphan)

    def _kill(self, child: _Child) -> None:
        for kill, pid in ((os.kill, child.pid), (os.killpg, child.pid)):
            # the group: where there is none yet, or no more; permission: a program that became another user's
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)

    def _tell(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        with contextlib.suppress(OSError):  # the controller is gone: the next turn of the loop sees it
            socket.send_fds(self._channel, [json.dumps(message).encode()], list(descriptors))


if __name__ == "__main__":
    main()
