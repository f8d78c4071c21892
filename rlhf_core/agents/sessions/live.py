"""A session while it is open: its budgets, its calls, and the replies that later requests continue.

::

    begin ──▶ Call ──admit (budget set aside)──▶ sampling ──finish, one a choice──▶ CallRecord
                                                                └──remember──▶ Reply, under the conversation it ends
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlhf_core.agents.sessions import refusal
from rlhf_core.agents.sessions.export import shows_first
from rlhf_core.records import CallRecord, SessionRecord, StopReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.agents.sessions.history import Conversation
    from rlhf_core.agents.sessions.refusal import CallRefusedError
    from rlhf_core.records import ImageRef, SessionRequest, VersionSpan


@dataclass(frozen=True, slots=True)
class Reply:
    """What the engine saw and said up to the end of a reply."""

    token_ids: tuple[int, ...]  # prompt and completion
    images: tuple[ImageRef, ...] = ()


class LiveSession:
    """One open session."""

    def __init__(self, request: SessionRequest) -> None:
        self.request = request
        self.closed = False
        self.refused = 0
        self.limit: StopReason | None = None  # that the newest call was refused for
        self.rewarded = asyncio.Event()  # the agent said that it is done
        self.reward: float | None = None
        self.score: float | None = None
        self.metrics: dict[str, float] = {}
        self.open_calls: dict[int, Call] = {}  # admitted and not through
        self._admitted = 0
        self._sampled = 0  # tokens, by calls that are through
        self._records: list[CallRecord] = []
        # Prompt and completion of each finished call, as bytes: compared fast; and the images of the prompt.
        self._spoken: list[tuple[bytes, tuple[ImageRef, ...]]] = []
        self._replies: dict[bytes, Reply] = {}

    def begin(self) -> Call:
        """A request came in.

        Raises:
            CallRefusedError: the session is closed, or has made its calls.
        """
        if self.closed:
            raise refusal.session_closed(self.request.session_id)
        if self._admitted + self.refused >= self.request.max_calls:
            raise refusal.calls_used_up(self.request.max_calls)
        return Call(self)

    def longest(self, conversation: Conversation) -> tuple[int, Reply] | None:
        """The stored reply that ends the longest part of a conversation, and how many messages that part has."""
        for length in range(len(conversation), 0, -1):
            reply = self._replies.get(conversation.digests[length])
            if reply is not None:
                return length, reply
        return None

    def refuse(self, error: CallRefusedError | None = None) -> None:
        """A call was answered with an error of the client's; ``error``: ours, where it was."""
        self.refused += 1
        self.limit = error.limit if error is not None else None

    def give(self, reward: float | None, score: float | None, metrics: dict[str, float], *, done: bool) -> None:
        """The agent, or whoever judges it, posts a reward; the last one counts."""
        self.reward, self.score = reward, score
        self.metrics.update(metrics)
        if done:
            self.rewarded.set()

    def close(self) -> None:
        """No more calls; those in flight end as aborted."""
        self.closed = True
        for call in list(self.open_calls.values()):
            call.abandon()

    def record(self) -> SessionRecord:
        """What the session amounts to."""
        return SessionRecord(
            session_id=self.request.session_id,
            calls=tuple(sorted(self._records, key=lambda record: (record.call, record.choice))),
            reward=self.reward,
            score=self.score,
            metrics=dict(self.metrics),
            refused_calls=self.refused,
            limit=self.limit,
        )

    @property
    def held(self) -> int:
        """Tokens set aside for calls in flight."""
        return sum(call.held for call in self.open_calls.values())

    # --- for Call ----------------------------------------------------------------------------------------------------

    def budget(self, prompt: Sequence[int], wanted: int | None, choices: int) -> tuple[int, bool]:
        """Tokens that each of ``choices`` answers to a prompt may have, and whether the context bounds them.

        Raises:
            CallRefusedError: there is none left, or the session is closed.
        """
        request = self.request
        if self.closed:
            raise refusal.session_closed(request.session_id)
        room = request.max_len - len(prompt)
        if room < 1:
            raise refusal.context_full(len(prompt), request.max_len)
        free = request.max_tokens - self._sampled - self.held
        left = free // choices
        if left < 1 <= free and not self.held:
            raise refusal.malformed(f"n is {choices}, and the session has {free} tokens left: ask for fewer answers")
        if left < 1:
            raise refusal.tokens_used_up(request.max_tokens, self.held)
        asked = min(left, request.sampling.max_tokens, wanted or left)
        return min(asked, room), room < asked

    def admit(self, call: Call) -> int:
        """The number of a call whose budget is set aside from now on."""
        self.limit = None
        self.open_calls[self._admitted] = call
        self._admitted += 1
        return self._admitted - 1

    def spoke(self, prompt: Sequence[int], images: Sequence[ImageRef]) -> bool:
        """True if a prompt holds, from its start, all of an earlier prompt and completion."""
        told = _bytes(prompt)
        return any(told.startswith(earlier) and shows_first(images, shown) for earlier, shown in self._spoken)

    def keep(self, record: CallRecord) -> None:
        """A choice is through."""
        self._records.append(record)
        self._sampled += len(record.token_ids)
        if record.stop_reason not in (StopReason.ABORTED, StopReason.ERROR):
            self._spoken.append((_bytes((*record.prompt_token_ids, *record.token_ids)), record.images))

    def remember(self, conversation: Conversation, reply: Reply) -> None:
        """A later request that starts with this conversation goes on from this reply's own tokens."""
        self._replies[conversation.whole] = reply


@dataclass(slots=True, eq=False)
class Call:
    """One request of a session. ``choices`` answers are sampled to one prompt."""

    session: LiveSession
    number: int = -1  # set when it is admitted
    conversation: Conversation | None = None  # what the client sent; None where it is no chat
    max_tokens: int | None = None  # what the client asked for
    clipped: bool = False  # its answer is bounded by the context before its budget
    prompt: tuple[int, ...] = ()
    images: tuple[ImageRef, ...] = ()  # of the prompt
    constrained: bool = False
    continued: bool = False
    budget: int = 0  # tokens of one choice
    started_at: float = field(default_factory=time.time)
    _start: float = field(default_factory=time.monotonic)
    _open: dict[int, Progress] = field(default_factory=dict)  # choices that are not through
    _kept: dict[int, CallRecord] = field(default_factory=dict)

    def admit(self, prompt: Sequence[int], choices: int) -> int:
        """Set tokens aside; the call is now part of the record, however it ends.

        Returns:
            How many tokens each choice may have.

        Raises:
            CallRefusedError: a budget is used up, or the session was closed.
        """
        self.budget, self.clipped = self.session.budget(prompt, self.max_tokens, choices)
        self.number = self.session.admit(self)
        self.prompt = tuple(prompt)
        self.continued = self.session.spoke(prompt, self.images)
        self._open = {choice: Progress() for choice in range(choices)}
        return self.budget

    @property
    def name(self) -> str:
        """Of its request at the engine; unique while the session lives."""
        return f"session-{self.session.request.session_id}-{self.number}"

    def check_open(self) -> None:
        """``CallRefusedError`` if nobody waits for it any more."""
        if self.session.closed or not self._open:
            raise refusal.session_closed(self.session.request.session_id)

    @property
    def open(self) -> bool:
        """True while a choice is being sampled."""
        return bool(self._open)

    @property
    def held(self) -> int:
        """Tokens set aside."""
        return self.budget * len(self._open)

    def progress(self, choice: int) -> Progress | None:
        """What was sampled so far; None once the choice is through."""
        return self._open.get(choice)

    def finish(self, choice: int, reason: StopReason, spans: Sequence[VersionSpan], error: str | None = None) -> None:
        """A choice is through. A second word about it is ignored: whoever abandoned the call was faster."""
        said = self._open.pop(choice, None)
        if said is None:
            return
        if not self._open:
            self.session.open_calls.pop(self.number, None)
        record = CallRecord(
            call=self.number,
            choice=choice,
            prompt_token_ids=self.prompt,
            token_ids=tuple(said.token_ids),
            logprobs=tuple(said.logprobs),
            version_spans=tuple(spans),
            stop_reason=reason,
            text=said.text,
            constrained=self.constrained,
            continued=self.continued,
            images=self.images,
            started_at=self.started_at,
            seconds=time.monotonic() - self._start,
            error=error,
        )
        self._kept[choice] = record
        self.session.keep(record)

    def fail(self, error: str) -> None:
        """The engine failed what is still open."""
        for choice in list(self._open):
            self.finish(choice, StopReason.ERROR, (), error)

    def abandon(self) -> None:
        """Nobody waits for what is still open: the client left, or the session was closed."""
        for choice in list(self._open):
            self.finish(choice, StopReason.ABORTED, ())

    def remember(self, choice: int, conversation: Conversation) -> None:
        """The client was told a reply that ends ``conversation``."""
        record = self._kept.get(choice)
        if record is None or record.stop_reason in (StopReason.ABORTED, StopReason.ERROR):
            return
        reply = Reply((*record.prompt_token_ids, *record.token_ids), record.images)
        self.session.remember(conversation, reply)

    def seed(self, asked: int | None) -> int | None:
        """The seed of this call: other calls and other samples of the prompt have others, whatever the agent asks for.

        An agent with a fixed seed would otherwise give the same answer in each episode of a group, and the group nothing
        to learn from.
        """
        base = self.session.request.sampling.seed
        if base is None:
            return asked
        told = f"{base}-{self.number if asked is None else f'asked-{asked}'}".encode()
        return int.from_bytes(hashlib.blake2b(told, digest_size=4).digest()) >> 1


@dataclass(slots=True)
class Progress:
    """What a choice has said so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""


def _bytes(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()
