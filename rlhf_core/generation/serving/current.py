"""The call that the running request belongs to."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

from rlhf_core.errors import GenerationError

if TYPE_CHECKING:
    from rlhf_core.agents.sessions import Call


class CallSlot:
    """Holds a request's call while the request is handled.

    A context outlives its task: timers keep theirs until they would have been due, cancelled ones too. What the context
    holds is therefore only this slot, which is emptied at the end.
    """

    def __init__(self, call: Call) -> None:
        self.call: Call | None = call


CURRENT: ContextVar[CallSlot | None] = ContextVar("rlhf_session_call", default=None)


def current_call() -> Call:
    """The call of this task.

    Raises:
        GenerationError: vLLM's classes were reached by another way than a session's call.
    """
    slot = CURRENT.get()
    if slot is None or slot.call is None:
        raise GenerationError("a request without a session reached the engine: nothing is sampled for it")
    return slot.call
