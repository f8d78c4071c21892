"""Agents elsewhere on the network: ``agent.url``. Each episode is posted to one of them.

::

    POST URL   {"session_id", "base_url", "api_key", "prompt", "label", "messages", "seed"}
    200        {"reward": ...}, as a function would return it; or no content: the reward is posted to the session, or scored
    202        taken on: the agent posts the reward, with "done", to {base_url}/sessions/{session_id}/reward

    no connection, 429, 503  ──▶ the next URL; after all of them again, ever later: the episode has not begun
    whatever else goes wrong ──▶ the sample fails: two agents must not share a session (502: the agent may have begun and died)
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx

from rlhf_core.agents.openai.answer import AgentAnswer, to_answer
from rlhf_core.errors import AgentDeadlineError, AgentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.agents.openai.task import AgentTask

CONNECT_SECONDS = 10.0
UNREACHED_SECONDS = 60.0  # an agent that restarts is back by then; one that is not there is not waited for longer
NOT_BEGUN = (429, 503)  # its queue is full
FIRST_PAUSE, MAX_PAUSE = 0.25, 5.0  # seconds between two rounds over all URLs
MAX_ANSWER = 1 << 20  # bytes
MAX_SHOWN = 300  # characters of an agent's text in a message


class _NotBegunError(Exception):
    """Nobody took the episode on."""


class _BusyError(_NotBegunError):
    """There is somebody, who may have time later."""


class UrlAgent:
    """``AgentRunner`` over HTTP. Belongs to the event loop of its first episode."""

    def __init__(self, urls: Sequence[str], unreached_seconds: float = UNREACHED_SECONDS) -> None:
        self._open = dict.fromkeys(urls, 0)  # episodes under way, by URL
        self._unreached_seconds = unreached_seconds
        self._client: httpx.AsyncClient | None = None

    async def run(self, task: AgentTask, seconds: float) -> AgentAnswer:
        """See ``AgentRunner``."""
        body = json.dumps(task.document()).encode()
        try:
            async with asyncio.timeout(seconds):
                return await self._first_that_takes_it(body)
        except TimeoutError as error:
            raise AgentDeadlineError(
                f"no agent of agent.url answered within agent.episode_timeout={seconds:.3g} s"
            ) from error

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _first_that_takes_it(self, body: bytes) -> AgentAnswer:
        patience = time.monotonic() + self._unreached_seconds
        pause = FIRST_PAUSE
        while True:
            refusals: dict[str, _NotBegunError] = {}
            while len(refusals) < len(self._open):
                url = min((url for url in self._open if url not in refusals), key=self._open.__getitem__)
                try:
                    return await self._post(url, body)
                except _NotBegunError as error:
                    refusals[url] = error
            busy = any(isinstance(error, _BusyError) for error in refusals.values())
            if not busy and time.monotonic() >= patience:
                listed = "; ".join(f"{shown_url(url)}: {error}" for url, error in refusals.items())
                raise AgentError(f"no agent of agent.url can be reached: {listed}")
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))
            pause = min(2 * pause, MAX_PAUSE)

    async def _post(self, url: str, body: bytes) -> AgentAnswer:
        place = f"the agent at {shown_url(url)}"
        self._open[url] += 1
        try:
            async with self._connections.stream("POST", url, content=body) as response:
                content = await _read(response, place)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _NotBegunError(f"no connection: {error or type(error).__name__}") from error
        except httpx.HTTPError as error:
            raise AgentError(f"{place} broke the connection: {error or type(error).__name__}") from error
        finally:
            self._open[url] -= 1
        return _answer(response, content, place)

    @property
    def _connections(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = httpx.AsyncClient(
                headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
                follow_redirects=False,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),  # episodes are long and few
                timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),  # ``run`` limits the call as a whole
                trust_env=False,
            )
        return self._client


def shown_url(url: str) -> str:
    """A URL for messages: its user and its query may hold a key."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


async def _read(response: httpx.Response, place: str) -> bytes:
    content = bytearray()
    async for piece in response.aiter_bytes():
        content += piece
        if len(content) > MAX_ANSWER:
            raise AgentError(f"{place} answered more than {MAX_ANSWER >> 10} KiB")
    return bytes(content)


def _answer(response: httpx.Response, content: bytes, place: str) -> AgentAnswer:
    status = f"{response.status_code} {response.reason_phrase}".rstrip()
    text = " ".join(content[: 4 * MAX_SHOWN].decode(errors="replace").split())[:MAX_SHOWN]
    if response.status_code in NOT_BEGUN:
        raise _BusyError(f"{status}: {text}")
    if not response.is_success:
        raise AgentError(f"{place} answered {status}: {text}")
    if response.status_code == httpx.codes.ACCEPTED:
        return AgentAnswer(posted_later=True)
    if not content.strip():
        return AgentAnswer()
    try:
        said = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AgentError(f"{place} answered {text!r}, which is no JSON: {error}") from error
    return to_answer(said, place)
