"""vLLM's serving classes speak to the engine through this: it samples as the trainer wants, and notes every token.

A call is recorded when its last token is there, before the client is told: a client that ends its episode right away finds
its call in the record.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

from vllm.exceptions import GracefulHTTPError

from rlhf_core.agents.sessions import Call, CallRefusedError
from rlhf_core.agents.sessions.refusal import malformed
from rlhf_core.errors import GenerationError
from rlhf_core.generation.results import checked_logprobs, stop_reason_of, version_spans_of
from rlhf_core.generation.serving.current import current_call
from rlhf_core.generation.serving.forced import force

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Sequence


class ServedEngine(Protocol):
    """What the server needs of an engine."""

    @property
    def client(self) -> Any:
        """vLLM's ``EngineClient``: configuration, renderer, input processor."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends an answer."""
        ...

    def stream(
        self, prompt: Any, params: Any, name: str, admitted: Callable[[], None], **options: Any
    ) -> AsyncGenerator[Any]:
        """vLLM's outputs of one request."""
        ...

    def check_request(self, prompt: Any, params: Any) -> None:
        """Raise vLLM's error for a request that it would not take."""
        ...

    async def abort(self, name: str) -> None:
        """End a request."""
        ...

    async def check_health(self) -> None:
        """Return if the engine can generate."""
        ...


class RecordingClient:
    """An ``EngineClient`` that serves calls of sessions, and only those."""

    def __init__(
        self, engine: ServedEngine, banned_ids: Collection[int] = (), image_token_id: int | None = None
    ) -> None:
        self._engine = engine
        self._banned_ids = tuple(banned_ids)
        self._image_token_id = image_token_id

    def __getattr__(self, name: str) -> Any:
        """Configuration, renderer, health: vLLM's own."""
        return getattr(self._engine.client, name)

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any]:
        """Sample for the call of this task. vLLM's name of the request is not used: a client may choose it.

        Raises:
            CallRefusedError: a budget of the session is used up, or the prompt holds image tokens of no image.
            ValueError: vLLM's, for options that the engine would not take: no call is made then.
        """
        call = current_call()
        self._check_image_tokens(call, prompt["prompt_token_ids"])
        self._engine.check_request(prompt, sampling_params)
        call.admit(prompt["prompt_token_ids"], sampling_params.n)
        params = force(call, sampling_params, self._engine.eos_ids, self._banned_ids)
        kept = {key: options.get(key) for key in ("reasoning_ended", "reasoning_parser_kwargs")}
        return self._record(call, prompt, params, kept)

    async def abort_call(self, call: Call) -> None:
        """End what a call still samples."""
        call.abandon()
        await self._engine.abort(call.name)

    async def _record(self, call: Call, prompt: Any, params: Any, options: dict[str, Any]) -> AsyncGenerator[Any]:
        try:
            async with aclosing(self._engine.stream(prompt, params, call.name, call.check_open, **options)) as outputs:
                async for output in outputs:
                    for completion in output.outputs:
                        self._note(call, completion)
                    yield output
        except (asyncio.CancelledError, GeneratorExit):
            call.abandon()
            raise
        except CallRefusedError as error:
            call.abandon()
            raise GracefulHTTPError(error.message, HTTPStatus(error.status)) from error
        except Exception as error:
            call.fail(f"{type(error).__name__}: {error}")
            raise

    def _check_image_tokens(self, call: Call, prompt: Sequence[int]) -> None:
        """A text can spell the image token: the trainer would look for an image there, and the engine may take one for it."""
        if self._image_token_id is None:
            return
        shown = sum(prompt[image.start : image.end].count(self._image_token_id) for image in call.images)
        if prompt.count(self._image_token_id) != shown:
            raise malformed("the text of the messages holds the model's image token: leave it out, or send an image")

    def _note(self, call: Call, completion: Any) -> None:
        progress = call.progress(completion.index)
        if progress is None:
            call.check_open()
            return
        token_ids = list(completion.token_ids)
        progress.token_ids += token_ids
        progress.logprobs += _sampled_logprobs(completion.logprobs, token_ids)
        progress.text += completion.text
        if completion.finish_reason is None:
            return
        reason, _ = stop_reason_of(call.name, completion, clipped=call.clipped, eos_ids=self._engine.eos_ids)
        checked_logprobs(call.name, progress.logprobs, progress.token_ids)
        spans = version_spans_of(call.name, completion.weight_versions, len(progress.token_ids))
        call.finish(completion.index, reason, spans)


def _sampled_logprobs(reported: Any, token_ids: list[int]) -> list[float]:
    """[T] of the sampled tokens; a client that asked for alternatives gets those too, in another format.

    Raises:
        GenerationError: vLLM left one out.
    """
    if not token_ids:
        return []
    if reported is None or len(reported) != len(token_ids):
        count = 0 if reported is None else len(reported)
        raise GenerationError(f"vLLM reported {count} log-probs for {len(token_ids)} sampled tokens")
    if getattr(reported, "token_ids", None) == token_ids:  # flat, nothing but the sampled tokens
        return list(reported.logprobs)
    return [place[token].logprob for place, token in zip(reported, token_ids, strict=True)]
