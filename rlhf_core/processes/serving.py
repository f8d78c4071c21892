"""The inside of a forked process: one instance, one call after the other, until the channel closes.

::

    {"make": seed}                           the instance: factory(seed)
    {"method": "step", "payload": {...}}     instance.step(payload)
        ──▶ {"result": ...}, {"raised": text, "trace": ...} (code of the user's) or {"refused": text} (code of this project)

A plain function is called outside the event loop, so that it may use ``asyncio.run``; a coroutine runs on a loop that
also turns between the calls, so that the connections it keeps stay alive.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import inspect
import random
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import ConfigError, RlhfError
from rlhf_core.processes.printed import flush
from rlhf_core.processes.values import decode_values, encode_values
from rlhf_core.processes.wire import CHUNK, FrameReader
from rlhf_core.user_file import describe

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

WHERE_SIGNAL = signal.SIGUSR2  # prints where every thread is, also in one that holds the interpreter's lock
MAX_TRACE = 3000  # characters of a traceback that are kept: its end


def serve(channel: socket.socket, load: Callable[[], Callable[[int], Any]]) -> int:
    """Answer until the channel closes; the exit code of the process.

    Args:
        channel: to the controller.
        load: gives the factory, which makes the instance of an episode from its seed (and may be ``async``).
    """
    faulthandler.register(WHERE_SIGNAL)
    channel.setblocking(False)
    server = _Server(channel)
    try:
        factory = load()
    except ConfigError as error:
        server.send({"error": str(error)})
        return 1
    import_generators()
    server.send({"ready": True})
    server.run(factory)
    return 0


class _Server:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._loop = asyncio.new_event_loop()
        self._instance: Any = None

    def run(self, factory: Callable[[int], Any]) -> None:
        """One call after the other."""
        while (request := self._loop.run_until_complete(self._receive())) is not None:
            answer = self._answer(factory, request)
            flush()
            self.send(answer)

    def send(self, message: dict[str, Any]) -> None:
        try:
            data = encode_values(message)
        except (TypeError, ValueError, RecursionError) as error:
            data = encode_values({"refused": f"the answer cannot be sent to the controller: {error}"})
        self._loop.run_until_complete(self._loop.sock_sendall(self._channel, data))

    async def _receive(self) -> Any:
        reader = FrameReader(decode_values)
        while piece := await self._loop.sock_recv(self._channel, CHUNK):
            if (message := reader.feed(piece)) is not None:
                return message
        return None

    def _answer(self, factory: Callable[[int], Any], request: dict[str, Any]) -> dict[str, Any]:
        try:
            if "make" in request:
                seed_generators(request["make"])
                self._instance = self._call(factory, request["make"])
                return {"result": None}
            method = getattr(self._instance, request["method"], None)
            if method is None and request["method"] == "close":
                return {"result": None}  # an instance that holds nothing needs no close
            if method is None:
                return {"refused": f"{type(self._instance).__name__} has no method {request['method']!r}"}
            return {"result": self._call(method, request["payload"])}
        except RlhfError as error:
            return {"refused": str(error)}
        except BaseException as error:  # noqa: BLE001 - whatever it was, SystemExit included, it is that call's result
            return {"raised": describe(error), "trace": traceback.format_exc()[-MAX_TRACE:]}

    def _call(self, function: Callable[[Any], Any], argument: Any) -> Any:
        asyncio.set_event_loop(self._loop)  # ``asyncio.run`` of an earlier call has set it to None
        if inspect.iscoroutinefunction(function):
            return self._loop.run_until_complete(function(argument))
        result = function(argument)
        return self._loop.run_until_complete(_wait_for(result)) if inspect.isawaitable(result) else result


async def _wait_for(result: Any) -> Any:
    return await result


def import_generators() -> None:
    """Import what ``seed_generators`` seeds and libraries import only when it is used: each process would, for 30 ms."""
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random")


def seed_generators(seed: int) -> None:
    """Seed the generators that the user's code may draw from: a resumed run then meets the same environments.

    Of numpy and torch only where the user's file has imported them. torch.cuda is left alone: a forked process cannot use it.
    """
    random.seed(seed)
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed(seed % 2**32)
    if torch := sys.modules.get("torch"):
        torch.random.default_generator.manual_seed(seed % 2**63)
