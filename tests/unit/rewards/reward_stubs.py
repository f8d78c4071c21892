"""Reward servers that follow a script, in threads of the test."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HANG = object()  # never answers
DROP = object()  # closes the connection without a word


def half(body: dict[str, Any]) -> Any:
    """A well-behaved server: 0.5 for every sample."""
    return {"rewards": [0.5] * len(body["query"])}


@dataclass
class Stub:
    """One server. ``script(body)`` gives the JSON of the answer, (status, bytes), HANG or DROP."""

    script: Callable[[dict[str, Any]], Any] = half
    seconds: float = 0.0  # an answer takes
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0
    url: str = ""
    at_once: int = 0  # calls under way
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _end: threading.Event = field(default_factory=threading.Event)

    @property
    def sizes(self) -> list[int]:
        """Samples of each call."""
        return [len(body["query"]) for body in self.bodies]

    def answer(self, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, bytes, dict[str, str]] | None:
        with self._lock:
            self.bodies.append(body)
            self.headers.append(headers)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            time.sleep(self.seconds)
            said = self.script(body)
            if said is HANG:
                self._end.wait()
            if said is HANG or said is DROP:
                return None
            if isinstance(said, tuple):
                return (*said, {}) if len(said) == 2 else said
            return 200, json.dumps(said).encode(), {}
        finally:
            with self._lock:
                self.at_once -= 1

    @contextlib.contextmanager
    def serving(self, port: int = 0) -> Iterator[Stub]:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                said = stub.answer(body, dict(self.headers))
                if said is None:
                    self.close_connection = True
                    return
                status, content, headers = said
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def handle(self):
                with contextlib.suppress(ConnectionError):  # the client may have given up
                    super().handle()

            def log_message(self, *_):
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128
            daemon_threads = True
            block_on_close = False

        server = Server(("127.0.0.1", port), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}/get_reward"
        try:
            yield self
        finally:
            self._end.set()
            server.shutdown()
            server.server_close()


def free_url() -> str:
    """Where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        return f"http://127.0.0.1:{held.getsockname()[1]}/get_reward"


@contextlib.contextmanager
def serving(*stubs: Stub) -> Iterator[str]:
    """The URLs of running servers, as reward.remote_url takes them."""
    with contextlib.ExitStack() as stack:
        yield ",".join(stack.enter_context(stub.serving()).url for stub in stubs)
