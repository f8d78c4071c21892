"""A proxy in front of an S3 server that does to requests what networks and overloaded stores do.

::

    with FaultProxy(server.endpoint) as proxy:
        store at proxy.endpoint ─▶ proxy ─▶ server
        proxy.add(answer(503, "SlowDown"), method="PUT", path="v00000002", times=2)

Each request meets the first fault that fits it and is not used up; without one it passes. ``proxy.seen`` says what came.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self
from urllib.parse import unquote

import aiohttp
from aiohttp import web
from yarl import URL

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

HOST = "127.0.0.1"
HOP_BY_HOP = ("Transfer-Encoding", "Connection", "Keep-Alive", "Expect")


@dataclass
class Exchange:
    """One request on its way; a fault may change it before it is forwarded."""

    request: web.Request
    body: bytes
    upstream: str
    session: aiohttp.ClientSession
    headers: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.headers = {name: value for name, value in self.request.headers.items() if name not in HOP_BY_HOP}

    async def forward(self) -> web.Response:
        """The server's answer, whole."""
        url = URL(self.upstream + self.request.raw_path, encoded=True)
        async with self.session.request(self.request.method, url, data=self.body, headers=self.headers) as got:
            headers = {name: value for name, value in got.headers.items() if name not in HOP_BY_HOP}
            data = await got.read()
        if self.request.method != "HEAD":
            headers.pop("Content-Length", None)
        return web.Response(status=got.status, body=data or None, headers=headers)

    async def cut(self, answer: web.Response, count: int) -> web.StreamResponse:
        """Begin to answer, and hang up after ``count`` bytes of the body."""
        begun = web.StreamResponse(status=answer.status, headers=answer.headers)
        begun.content_length = len(answer.body)
        await begun.prepare(self.request)
        await begun.write(answer.body[:count])
        await asyncio.sleep(0.05)  # let them arrive
        return self.hang_up()

    def hang_up(self) -> web.StreamResponse:
        """Close the connection without another byte."""
        self.request.transport.abort()
        raise ConnectionResetError("on purpose")

    def sign_again(self, key: str, secret: str) -> None:
        """After headers were changed."""
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        for name in [name for name in self.headers if name.lower() in ("authorization", "x-amz-date")]:
            del self.headers[name]
        url = f"http://{self.request.host}{self.request.raw_path}"
        signed = AWSRequest(self.request.method, url, self.headers, self.body)
        S3SigV4Auth(Credentials(key, secret), "s3", "us-east-1").add_auth(signed)
        self.headers = dict(signed.headers.items())


if TYPE_CHECKING:
    Fault = Callable[[Exchange], Awaitable[web.StreamResponse]]


async def stall(exchange: Exchange) -> web.StreamResponse:
    """Accept, and never answer; not even that the body may come."""
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def drop(exchange: Exchange) -> web.StreamResponse:
    """Hang up; the server hears nothing of it."""
    return exchange.hang_up()


async def lose_answer(exchange: Exchange) -> web.StreamResponse:
    """The server does it, and its answer never comes."""
    await exchange.forward()
    return exchange.hang_up()


async def truncate(exchange: Exchange) -> web.StreamResponse:
    """Half of the answer's body, then nothing."""
    answer = await exchange.forward()
    return await exchange.cut(answer, len(answer.body) // 2)


async def shorten(exchange: Exchange) -> web.StreamResponse:
    """Half of the answer's body, as if that were all of it."""
    answer = await exchange.forward()
    answer.body = answer.body[: len(answer.body) // 2]
    return answer


async def flip_sent(exchange: Exchange) -> web.StreamResponse:
    """One bit of the request's body is another."""
    exchange.body = _flipped(exchange.body)
    return await exchange.forward()


async def flip_received(exchange: Exchange) -> web.StreamResponse:
    """One bit of the answer's body is another."""
    answer = await exchange.forward()
    answer.body = _flipped(answer.body)
    return answer


def delay(seconds: float) -> Fault:
    """Pass it on later."""

    async def act(exchange: Exchange) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return await exchange.forward()

    return act


def answer(status: int, code: str) -> Fault:
    """Answer in the server's place."""

    async def act(exchange: Exchange) -> web.StreamResponse:
        body = f"<Error><Code>{code}</Code><Message>on purpose</Message></Error>"
        return web.Response(status=status, text=body, content_type="application/xml")

    return act


def unconditional(key: str, secret: str) -> Fault:
    """As a store does that knows nothing of conditional writes: without If-None-Match."""

    async def act(exchange: Exchange) -> web.StreamResponse:
        exchange.headers = {n: v for n, v in exchange.headers.items() if n.lower() != "if-none-match"}
        exchange.sign_again(key, secret)
        return await exchange.forward()

    return act


@dataclass
class _Rule:
    fault: Fault
    method: str | None
    path: str
    query: str
    times: int | None


class FaultProxy:
    """The proxy, in a thread of its own."""

    def __init__(self, upstream: str) -> None:
        self.seen: list[tuple[str, str]] = []  # (method, path and query) of what came, in order
        self._upstream = upstream
        self._rules: list[_Rule] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._port = 0

    @property
    def endpoint(self) -> str:
        """In place of the server's."""
        return f"http://{HOST}:{self._port}"

    def add(
        self, fault: Fault, method: str | None = None, path: str = "", query: str = "", times: int | None = None
    ) -> None:
        """Requests of this method whose path and query contain these meet ``fault``, so many times (default: always)."""
        self._rules.append(_Rule(fault, method, path, query, times))

    def clear(self) -> None:
        """From now on everything passes, and nothing was seen."""
        self._rules.clear()
        self.seen.clear()

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> None:
        self._session = aiohttp.ClientSession(auto_decompress=False)
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._handle, expect_handler=self._expect)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, 0)
        await site.start()
        self._port = site._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        await self._session.close()
        await self._runner.cleanup()

    async def _expect(self, request: web.Request) -> None:
        """A client waits for leave before it sends a body; a server that stalls gives none."""
        rule = self._rule(request)
        if rule is not None and rule.fault is stall:
            await self._handle(request)
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.seen.append((request.method, request.raw_path))
        rule = self._rule(request)
        if rule is not None and rule.times is not None:
            rule.times -= 1
        body = b"" if rule is not None and rule.fault is stall else await request.read()
        exchange = Exchange(request, body, self._upstream, self._session)
        return await (exchange.forward() if rule is None else rule.fault(exchange))

    def _rule(self, request: web.Request) -> _Rule | None:
        for rule in self._rules:
            fits = rule.method in (None, request.method) and rule.path in unquote(request.path)
            if fits and rule.query in request.query_string and rule.times != 0:
                return rule
        return None


def _flipped(data: bytes) -> bytes:
    altered = bytearray(data)
    altered[len(altered) // 2] ^= 1
    return bytes(altered)
