"""Which session does a request belong to? Everything but the health route needs the key of an open one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from rlhf_core.agents.sessions import CallRefusedError
from rlhf_core.agents.sessions.refusal import unknown_key
from rlhf_core.generation.serving.answers import refusal_response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    from rlhf_core.agents.sessions import Call, LiveSession, SessionStore
    from rlhf_core.generation.serving.current import CallSlot

    Scope = MutableMapping[str, Any]
    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/health",)
CALL_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
BEARER = "bearer"
MAX_BODY = 64 << 20  # bytes: an image of data.image_max_bytes, and room; to parse more would hold up all other calls
SESSION_HEADER = "x-session-id"


class SessionAccess:
    """ASGI middleware: finds the session, counts what was refused, and ends calls whose client is gone."""

    def __init__(self, app: App, store: SessionStore, abort: Callable[[Call], Awaitable[None]]) -> None:
        self._app = app
        self._store = store
        self._abort = abort

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI. ``request.state.session`` is the session; routes leave their call in ``call_slot`` there."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            session = self._store.find(*_credentials(Headers(scope=scope)))
        except CallRefusedError as error:
            await refusal_response(error)(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["session"] = session
        receive = _limited(receive)
        counting = scope["path"] in CALL_PATHS and scope["method"] == "POST"
        try:
            await self._app(scope, receive, _counted(send, session, state) if counting else send)
        finally:
            slot: CallSlot | None = state.pop("call_slot", None)
            state.clear()  # an idle connection keeps the state of its last request
            if slot is not None:
                call, slot.call = slot.call, None
                if call is not None and call.open:
                    await self._abort(call)


def _limited(receive: Receive) -> Receive:
    """The body, while it is not too large."""
    read = 0

    async def watched() -> Message:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        if read > MAX_BODY:
            raise HTTPException(413, f"a request has at most {MAX_BODY >> 20} MiB")  # FastAPI passes on no other error
        return message

    return watched


def _credentials(headers: Headers) -> tuple[str, str | None]:
    """Key and, where it is sent, session id.

    Raises:
        CallRefusedError: there is no bearer token.
    """
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != BEARER or not key.strip():
        raise unknown_key()
    return key.strip(), headers.get(SESSION_HEADER)


def _counted(send: Send, session: LiveSession, state: dict[str, Any]) -> Send:
    """The answer's status is looked at before the client sees it."""

    async def watched(message: Message) -> None:
        if message["type"] == "http.response.start" and 400 <= message["status"] < 500:
            slot: CallSlot | None = state.get("call_slot")
            if (
                slot is None or slot.call is None or slot.call.number < 0
            ):  # an admitted call is in the record, whatever became of it
                session.refuse(state.get("refusal"))
        await send(message)

    return watched
