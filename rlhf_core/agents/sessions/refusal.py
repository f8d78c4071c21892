"""Why the server does not make a call. The client gets it in OpenAI's error format; the session counts it."""

from __future__ import annotations

from rlhf_core.errors import RlhfError
from rlhf_core.records import StopReason


class CallRefusedError(RlhfError, PermissionError):
    """A call that was not made.

    ``status`` is HTTP's, ``code`` OpenAI's word for it, ``limit`` what was used up. ``retry``: the same call may succeed later.
    """

    def __init__(
        self, status: int, code: str, message: str, limit: StopReason | None = None, retry: bool = False
    ) -> None:
        super().__init__(status, code, message, limit, retry)
        self.status = status
        self.code = code
        self.message = message
        self.limit = limit
        self.retry = retry

    def __str__(self) -> str:
        return self.message


def unknown_key() -> CallRefusedError:
    """No session has this key."""
    return CallRefusedError(
        401,
        "invalid_api_key",
        "no session is open with this API key: send the key of an open session as bearer token (and, with the header "
        "X-Session-ID, the id of that same session)",
    )


def session_closed(session_id: str) -> CallRefusedError:
    """The episode is over."""
    return CallRefusedError(409, "session_closed", f"session {session_id!r} is closed: its episode is over")


def calls_used_up(limit: int) -> CallRefusedError:
    """Also refused calls count: an agent that repeats one forever must end."""
    return CallRefusedError(
        429,
        "max_calls",
        f"the session has made its {limit} calls: raise agent.server.max_calls if it needs more",
        StopReason.MAX_TURNS,
    )


def tokens_used_up(limit: int, held: int) -> CallRefusedError:
    """``held``: tokens that calls in flight may still use."""
    if held:
        return CallRefusedError(
            429,
            "max_tokens",
            f"the session's {limit} tokens are used up, {held} of them set aside for calls in flight: send fewer calls at "
            "once, or give each a smaller max_tokens",
            retry=True,
        )
    return CallRefusedError(
        429,
        "max_tokens",
        f"the session has sampled its {limit} tokens: raise rollout.max_new_tokens if it needs more",
        StopReason.LENGTH,
    )


def context_full(prompt: int, limit: int) -> CallRefusedError:
    """OpenAI's word for it, which agents that compact their history know."""
    return CallRefusedError(
        400,
        "context_length_exceeded",
        f"the prompt of {prompt} tokens leaves no room for an answer in a context of {limit} tokens: shorten the "
        "messages, or raise data.max_len",
        StopReason.CONTEXT_FULL,
    )


def too_long(message: str) -> CallRefusedError:
    """The same, where the engine says it."""
    return CallRefusedError(400, "context_length_exceeded", message, StopReason.CONTEXT_FULL)


def not_recordable(option: str) -> CallRefusedError:
    """What the record of a session cannot express."""
    return CallRefusedError(400, "unsupported_option", f"{option} cannot be used in a session: leave it out")


def malformed(message: str) -> CallRefusedError:
    """A request that says nothing sensible."""
    return CallRefusedError(400, "invalid_value", message)
