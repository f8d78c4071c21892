"""vLLM's serving classes, with each request made a call of its session."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

from rlhf_core.agents.sessions.refusal import malformed, not_recordable
from rlhf_core.generation.serving.current import CURRENT, CallSlot
from rlhf_core.generation.serving.forced import refuse_unrecordable
from rlhf_core.generation.serving.replies import (
    remember_choice,
    remember_events,
    remember_response,
    remember_stream,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from rlhf_core.agents.sessions import Call


class RecordedChat(OpenAIServingChat):  # type: ignore[misc]  # vLLM has no types here
    """/v1/chat/completions."""

    async def create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        """See vLLM's. The last token's record is made, and the reply remembered, before the client is told."""
        call = _begin(request, raw_request, ("max_completion_tokens", "max_tokens"))
        if not self.enable_auto_tools and request.tools and request.tool_choice == "auto":
            request.tool_choice = "none"  # no parser: the answer is text
        response = await super().create_chat_completion(request, raw_request)
        if isinstance(response, ChatCompletionResponse):
            for choice in response.choices:
                remember_choice(call, choice.index, choice.message.model_dump())
            return response
        return _passed_on(response, remember_stream, call)


class RecordedResponses(OpenAIServingResponses):  # type: ignore[misc]  # vLLM has no types here
    """/v1/responses. Nothing is stored: the client sends the whole history with each request."""

    async def create_responses(self, request: Any, raw_request: Any = None) -> Any:
        """See vLLM's."""
        call = _begin(request, raw_request, ("max_output_tokens",))
        for tool in request.tools:
            if tool.type != "function":  # vLLM would leave it out without a word
                raise not_recordable(f"the tool {tool.type}")
        response = await super().create_responses(request, raw_request)
        if isinstance(response, ResponsesResponse):
            remember_response(call, request, response)
            return response
        return _passed_on(response, remember_events, call, request)


class RecordedCompletion(OpenAIServingCompletion):  # type: ignore[misc]  # vLLM has no types here
    """/v1/completions: text or token ids, without messages. One that continues an earlier one says so by its tokens."""

    async def create_completion(self, request: Any, raw_request: Any = None) -> Any:
        """See vLLM's."""
        _begin(request, raw_request, ("max_tokens",))
        request.max_tokens = 1  # vLLM wants a number; the session's budget takes its place
        prompt = request.prompt
        if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
            raise not_recordable("a list of several prompts")
        return await super().create_completion(request, raw_request)


def _begin(request: Any, raw_request: Any, limits: tuple[str, ...]) -> Call:
    """Make the request a call; ``limits``: its fields that say how many tokens the client wants, the first one counts.

    Raises:
        CallRefusedError: a budget is used up, or the request asks for what cannot be recorded.
    """
    call: Call = raw_request.state.session.begin()
    slot = raw_request.state.call_slot = CallSlot(call)
    refuse_unrecordable(request)
    wanted = [value for name in limits if (value := getattr(request, name)) is not None]
    call.max_tokens = wanted[0] if wanted else None
    if call.max_tokens is not None and call.max_tokens < 1:
        raise malformed(f"{limits[0]} is {call.max_tokens}: at least 1 token must be allowed")
    if (getattr(request, "n", None) or 1) < 1:
        raise malformed(f"n is {request.n}: at least 1 answer must be asked for")
    for name in limits:  # vLLM would refuse what does not fit into the context; here it is cut
        setattr(request, name, None)
    CURRENT.set(slot)
    return call


def _passed_on(response: Any, remember: Any, call: Call, *args: Any) -> Any:
    """A stream, watched; anything else (an error) as it is."""
    if not hasattr(response, "__anext__"):
        return response
    return _closing(CURRENT.get(), response, remember(call, *args, response))


async def _closing(slot: CallSlot | None, source: Any, watched: Any) -> AsyncGenerator[Any]:
    """Closing this one closes vLLM's own, which else lives until the collector finds it."""
    CURRENT.set(slot)  # a stream is read by another task, and the Responses API asks the engine only then
    async with aclosing(source), aclosing(watched):
        async for part in watched:
            yield part
