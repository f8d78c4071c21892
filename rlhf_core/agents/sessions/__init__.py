"""Sessions of the OpenAI-compatible server, without the server: what they hold, what a request continues, what is trained.

::

    SessionStore ──▶ LiveSession ──begin──▶ Call ──admit──▶ (engine) ──finish──▶ CallRecord
                        └── replies, by the conversation that led to them: what a later request continues
    close ──▶ SessionRecord ──export_segments──▶ one row per leaf of the tree of calls
"""

from rlhf_core.agents.sessions.continuation import Span, Spliced, splice
from rlhf_core.agents.sessions.export import SessionRow, continued_share, export_segments
from rlhf_core.agents.sessions.history import Conversation, message_key
from rlhf_core.agents.sessions.live import Call, LiveSession, Reply
from rlhf_core.agents.sessions.refusal import CallRefusedError
from rlhf_core.agents.sessions.store import SessionStore

__all__ = [
    "Call",
    "CallRefusedError",
    "Conversation",
    "LiveSession",
    "Reply",
    "SessionRow",
    "SessionStore",
    "Span",
    "Spliced",
    "continued_share",
    "export_segments",
    "message_key",
    "splice",
]
