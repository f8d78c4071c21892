"""What the client was told, as the chat message that it will send back as history.

::

    chat       choices[i].message, or the deltas of a stream put together
    responses  the items of the output, merged into messages as vLLM will merge them when they come back
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from openai.types.responses import ResponseErrorEvent
from vllm.entrypoints.openai.responses.utils import construct_input_messages
from vllm.exceptions import VLLMError

from rlhf_core.agents.sessions import CallRefusedError
from rlhf_core.errors import RlhfError
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from rlhf_core.agents.sessions import Call

logger = get_logger(__name__)

DATA = "data: "
DONE = "[DONE]"
LAST_EVENTS = ("response.completed", "response.incomplete")


def remember_choice(call: Call, choice: int, message: dict[str, Any]) -> None:
    """The client was told a message; whatever history begins with it goes on from its tokens."""
    if call.conversation is not None:
        call.remember(choice, call.conversation.then([message]))


async def remember_stream(call: Call, chunks: AsyncIterator[str]) -> AsyncGenerator[str]:
    """Pass a stream of chat chunks on; each choice is remembered before its last chunk leaves."""
    told: dict[int, dict[str, Any]] = {}
    async for chunk in chunks:
        for choice in _choices(chunk):
            index = choice["index"]
            _add_delta(told.setdefault(index, {"role": "assistant", "content": "", "tool_calls": []}), choice["delta"])
            if choice.get("finish_reason") is not None:
                remember_choice(call, index, told[index])
        yield chunk


def remember_response(call: Call, request: Any, response: Any) -> None:
    """The same for a response of the Responses API, whose history is a list of items."""
    if call.conversation is None:
        return
    told = request.input
    items = [{"role": "user", "content": told}] if isinstance(told, str) else list(told)
    messages = construct_input_messages(
        request_instructions=request.instructions, request_input=[*items, *response.output]
    )
    call.remember(0, call.conversation.instead(messages))


async def remember_events(call: Call, request: Any, events: AsyncIterator[Any]) -> AsyncGenerator[Any]:
    """The same for a stream of it. The engine is asked only when the stream has begun, so an error is its last event."""
    number = -1
    try:
        async for event in events:
            number = event.sequence_number
            if event.type in LAST_EVENTS:
                remember_response(call, request, event.response)
            yield event
    except (RlhfError, VLLMError, ValueError) as error:
        refused = error if isinstance(error, CallRefusedError) else None
        if call.number < 0:
            call.session.refuse(refused)
        if isinstance(error, RlhfError) and refused is None:
            logger.warning("a call failed: %s", error)
        code = "server_error" if refused is None else refused.code
        yield ResponseErrorEvent(type="error", code=code, message=str(error), sequence_number=number + 1)


def _choices(chunk: str) -> list[dict[str, Any]]:
    data = chunk.removeprefix(DATA).strip()
    if data == DONE or not data.startswith("{"):
        return []
    choices: list[dict[str, Any]] = json.loads(data).get("choices") or []
    return choices


def _add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    message["content"] += delta.get("content") or ""
    for part in delta.get("tool_calls") or ():
        calls: list[dict[str, Any]] = message["tool_calls"]
        while len(calls) <= part["index"]:
            calls.append({"id": None, "type": "function", "function": {"name": None, "arguments": ""}})
        call, function = calls[part["index"]], part.get("function") or {}
        call["id"] = part.get("id") or call["id"]
        call["function"]["name"] = function.get("name") or call["function"]["name"]
        call["function"]["arguments"] += function.get("arguments") or ""
