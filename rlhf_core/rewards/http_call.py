"""One call of a reward server, and what it means if it fails. The JSON is that of OpenRLHF's reward servers::

    POST URL   {"query": [prompt + answer, ...], "prompts": [...], "labels": [...]}
    200        {"rewards": [...]} or [...]; "scores" and "extra_logs" as a reward function gives them (answers.py)

What the engine sampled need not be valid Unicode: JSON in ASCII carries lone surrogates too.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from enum import StrEnum
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.records import RewardRequest

MAX_ANSWER = 16 << 20  # bytes; a longer one is no list of rewards
MAX_SHOWN = 200  # characters of a server's text in a message
KEEPALIVE_SECONDS = 2.0  # below the 5 s after which common servers close an idle connection
KNOCK_SECONDS = 5.0
NOT_REACHED = (502, 503)  # said by a gateway without a server behind it, or by a server whose queue is full


class Failure(StrEnum):
    """Why a call gave no answer: it decides whether there is another call."""

    UNAVAILABLE = "unavailable"  # no connection, 502 or 503: the samples never reached the scorer
    BROKEN = "broken"  # another 5xx, or the connection broke: these samples may be the cause
    TIMED_OUT = "timed_out"
    REFUSED = "refused"  # 4xx, a redirect, or no JSON: another call would end the same way


class CallError(Exception):
    """A call without an answer."""

    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


def make_clients(count: int, token: str | None) -> list[httpx.AsyncClient]:
    """Clients for one call at a time each, which keep their connections. No proxy and no ``.netrc`` is used.

    One client for all calls would look through all connections at each of them: six times the work with 64.
    """
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    certificates = ssl.create_default_context()  # the system's, or those of $SSL_CERT_FILE
    return [
        httpx.AsyncClient(
            headers=headers,
            follow_redirects=False,
            limits=httpx.Limits(keepalive_expiry=KEEPALIVE_SECONDS),
            timeout=None,  # `post` limits the call as a whole
            trust_env=False,
            verify=certificates,
        )
        for _ in range(count)
    ]


def shown(url: str) -> str:
    """A URL for messages: its query may hold a key."""
    return urlsplit(url)._replace(query="", fragment="").geturl()


def knock(url: str) -> str | None:
    """Open a connection and close it again; what is wrong, or None. A busy server passes too: its queue takes it in."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    try:
        socket.create_connection((parts.hostname or "", port), KNOCK_SECONDS).close()
    except (OSError, UnicodeError) as error:
        return str(error)
    return None


def body_of(samples: Sequence[RewardRequest]) -> bytes:
    """What is sent for some samples. ``TypeError`` or ``ValueError`` if a label is not JSON."""
    columns = {
        "query": [sample.query for sample in samples],
        "prompts": [sample.prompt for sample in samples],
        "labels": [sample.label for sample in samples],
    }
    return json.dumps(columns, allow_nan=False).encode("ascii")


async def post(client: httpx.AsyncClient, url: str, body: bytes, limit: float) -> Any:
    """The JSON that a server answers within ``limit`` seconds, or ``CallError``."""
    try:
        async with asyncio.timeout(limit), client.stream("POST", url, content=body) as response:
            content = await _read(response)
    except TimeoutError:
        raise CallError(Failure.TIMED_OUT, f"no answer within {limit:.3g} s (reward.timeout)") from None
    except httpx.ConnectError as error:
        raise CallError(Failure.UNAVAILABLE, f"no connection: {error}") from error
    except httpx.TransportError as error:
        raise CallError(Failure.BROKEN, f"the connection broke: {error or type(error).__name__}") from error
    _check_status(response, content)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CallError(Failure.REFUSED, f"its answer {_start(content)!r} is no JSON: {error}") from error


async def _read(response: httpx.Response) -> bytes:
    content = bytearray()
    async for piece in response.aiter_bytes():
        content += piece
        if len(content) > MAX_ANSWER:
            raise CallError(Failure.REFUSED, f"its answer is longer than {MAX_ANSWER >> 20} MiB")
    return bytes(content)


def _check_status(response: httpx.Response, content: bytes) -> None:
    if response.is_success:
        return
    status = f"{response.status_code} {response.reason_phrase}".rstrip()
    if response.is_redirect:
        target = shown(response.headers.get("location", ""))
        raise CallError(Failure.REFUSED, f"{status} to {target!r}: name the final URL in reward.remote_url")
    message = f"{status}: {_start(content)}" if content else status
    if response.status_code in NOT_REACHED:
        raise CallError(Failure.UNAVAILABLE, message)
    raise CallError(Failure.BROKEN if response.is_server_error else Failure.REFUSED, message)


def _start(content: bytes) -> str:
    text = " ".join(content[: 4 * MAX_SHOWN].decode(errors="replace").split())
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
