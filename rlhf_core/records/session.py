"""A session of the OpenAI-compatible server: the calls of one agent in one episode, as the engine saw them.

::

    open_session ──▶ Session(base_url, api_key) ──▶ any OpenAI client ──calls──▶ engine
    close_session ──▶ SessionRecord(calls, reward)      token ids and log-probs are the engine's own, never re-tokenised
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rlhf_core.records.generation import SamplingParams
    from rlhf_core.records.trajectory import ImageRef, StopReason, VersionSpan


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """What an episode asks for when it opens a session."""

    session_id: str  # unique within the run while the session lives
    sampling: SamplingParams  # forced on every call; ``max_tokens``: the most of one call
    max_tokens: int  # sampled by all calls together
    max_len: int  # prompt plus answer of one call, tokens
    max_calls: int
    affinity: str = ""  # sessions with one key share a prefix, and go to one engine while its load allows


@dataclass(frozen=True, slots=True)
class Session:
    """What an agent needs to make calls."""

    session_id: str
    base_url: str  # ends in /v1
    api_key: str = field(repr=False)  # names the session and proves that the caller may use it: no word for logs


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One choice of one call. ``P`` prompt tokens, ``T`` sampled ones."""

    call: int  # 0, 1, ... in the order in which the calls arrived
    choice: int  # 0 .. n - 1
    prompt_token_ids: tuple[int, ...]  # [P] as the engine saw them, image placeholders expanded
    token_ids: tuple[int, ...]  # [T]
    logprobs: tuple[float, ...]  # [T] at the sampling temperature
    version_spans: tuple[VersionSpan, ...]  # over the T tokens
    stop_reason: StopReason
    text: str  # what was sampled, for people
    constrained: bool = False  # by a grammar, a forced tool or a bias: the log-probs are not the policy's own
    continued: bool = False  # the prompt holds what the session already held, token by token
    images: tuple[ImageRef, ...] = ()  # of the prompt; positions are into ``prompt_token_ids``
    started_at: float = 0.0  # unix seconds
    seconds: float = 0.0
    error: str | None = None  # the reason, where stop_reason is ERROR


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """What is left of a closed session."""

    session_id: str
    calls: tuple[CallRecord, ...]
    reward: float | None = None  # posted to the session
    score: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    refused_calls: int = 0  # over the limits, or malformed: answered with an error
    # That the newest call hit, if it was refused for it: LENGTH, CONTEXT_FULL or MAX_TURNS (calls).
    limit: StopReason | None = None


class AgentServer(Protocol):
    """Where sessions are opened and closed."""

    async def open_session(self, request: SessionRequest) -> Session:
        """Make calls possible.

        Raises:
            WorkerError: the engine behind the server is gone.
        """
        ...

    async def reward_posted(self, session_id: str, seconds: float) -> bool:
        """Wait until the session was given its reward with ``done``, at most so many seconds; whether it was.

        Raises:
            WorkerError: the engine behind the server is gone.
        """
        ...

    async def close_session(self, session_id: str) -> SessionRecord:
        """End the session: calls in flight are aborted, later ones refused (409). Closing twice gives the same record."""
        ...
