"""From messages to the prompt: the template's rendering, but with the session's own tokens where it holds them.

::

    messages ──vLLM──▶ rendered ids R
        └── a reply of this session among them? ──bridge──▶ prompt + reply as they were, + what the template puts behind
                                                            else, or if that is not how R ends: R as it is
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.renderers.hf import HfRenderer, resolve_chat_template, resolve_chat_template_kwargs
from vllm.renderers.online_renderer import OnlineRenderer

from rlhf_core.agents.multi_turn.bridge import make_bridge
from rlhf_core.agents.sessions import Conversation, Span, splice
from rlhf_core.agents.sessions.refusal import malformed, too_long
from rlhf_core.generation.serving.current import current_call
from rlhf_core.records import ImageRef

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from rlhf_core.agents.sessions import Call, Reply
    from rlhf_core.generation.serving.pictures import Picture, Pictures

TOO_LONG = "input_tokens"  # vLLM's name of what is wrong with a prompt that is longer than its context

# Set by whoever renders the bridge, or not wanted in it.
NO_OPTIONS = ("add_generation_prompt", "continue_final_message", "tokenize", "return_dict", "tools", "chat_template")


class SplicingRenderer(OnlineRenderer):  # type: ignore[misc]  # vLLM has no types here
    """vLLM's renderer of the chat and responses APIs, for calls of sessions."""

    def __init__(self, *args: Any, exact: bool, eos_ids: Collection[int], pictures: Pictures, **options: Any) -> None:
        super().__init__(*args, **options)
        self._pictures = pictures
        self._exact = exact
        self._eos_ids = eos_ids

    async def preprocess_chat(
        self,
        request: Any,
        messages: list[Any],
        default_template: str | None,
        default_template_content_format: Any,
        default_template_kwargs: dict[str, Any] | None,
        tool_dicts: list[dict[str, Any]] | None = None,
        **options: Any,
    ) -> tuple[list[Any], list[Any]]:
        """See vLLM's."""
        call = current_call()
        params = request.build_chat_params(default_template, default_template_content_format)
        params = params.with_defaults({**(default_template_kwargs or {}), "tools": tool_dicts})
        pictures = await self._pictures.take_in(messages)
        # Now: vLLM changes the arguments of tool calls in place.
        call.conversation = Conversation.of(messages, _frame(params))
        try:
            conversation, (rendered,) = await super().preprocess_chat(
                request,
                messages,
                default_template,
                default_template_content_format,
                default_template_kwargs,
                tool_dicts,
                **options,
            )
        except VLLMValidationError as error:
            if error.parameter == TOO_LONG:
                raise too_long(str(error)) from error
            raise
        if self._exact and len(conversation) == len(messages):
            self._continue(call, conversation, params, rendered)
        call.images = _image_refs(pictures, rendered)
        # Looked at here too: an answer that has begun to stream cannot say that there was no budget for it.
        call.session.budget(rendered["prompt_token_ids"], call.max_tokens, getattr(request, "n", None) or 1)
        return conversation, [rendered]

    def _continue(self, call: Call, conversation: list[Any], params: Any, rendered: Any) -> None:
        """Put the session's own tokens into ``rendered``, where that is possible."""
        assert call.conversation is not None
        found = call.session.longest(call.conversation)
        if found is None:
            return
        length, reply = found
        bridge = self._bridge(conversation[length:], params, reply)
        spans = _image_spans(rendered)
        if bridge is None or spans is None:
            return
        known = [Span(image.start, image.end) for image in reply.images]
        spliced = splice(reply.token_ids, known, bridge, rendered["prompt_token_ids"], spans)
        if spliced is None:
            return
        rendered["prompt_token_ids"] = spliced.token_ids
        rendered.pop("prompt", None)  # the text of the rendering: no longer that of the ids
        _move_images(rendered, spliced.spans)

    def _bridge(self, messages: Sequence[Any], params: Any, reply: Reply) -> list[int] | None:
        """What follows the reply, one token an image; None where the template does not say."""
        options = params.get_apply_chat_template_kwargs()
        if options.get("continue_final_message"):  # the reply itself is to be continued, if it is the last message
            return None if messages or reply.token_ids[-1] in self._eos_ids else []
        if not options.get("add_generation_prompt") or not isinstance(self.renderer, HfRenderer):
            return None
        if any(message["role"] == "developer" for message in messages):
            return None  # vLLM makes it a system message, at the beginning
        tokenizer = self.renderer.get_tokenizer()
        tools = options.get("tools")
        template = resolve_chat_template(
            tokenizer, chat_template=options.get("chat_template"), tools=tools, model_config=self.model_config
        )
        if template is None:
            return None
        wanted = {key: value for key, value in options.items() if key not in NO_OPTIONS}
        accepted = resolve_chat_template_kwargs(tokenizer, template, wanted)
        bridge = make_bridge(tokenizer, messages, self._eos_ids, template=template, tools=tools, options=accepted)
        if bridge is None:
            return None
        ids = tokenizer.encode(bridge.text, add_special_tokens=False)
        return list(ids[bridge.already_said(reply.token_ids[-1]) :])


def _frame(params: Any) -> dict[str, Any]:
    """What a prompt is made of besides its messages. How it ends belongs to the last message, not to the history."""
    kept = {key: value for key, value in params.chat_template_kwargs.items() if key not in NO_OPTIONS[:4]}
    return {**kept, "chat_template": params.chat_template}


def _image_spans(rendered: Any) -> list[Span] | None:
    """Where the images are; None if there is other media, which a session cannot hold."""
    placeholders = rendered.get("mm_placeholders") or {}
    if any(ranges for modality, ranges in placeholders.items() if modality != "image"):
        return None
    return [Span(place.offset, place.offset + place.length) for place in placeholders.get("image", ())]


def _image_refs(pictures: Sequence[Picture], rendered: Any) -> tuple[ImageRef, ...]:
    """``CallRefusedError`` if the prompt shows other images than the messages."""
    spans = _image_spans(rendered)
    if spans is None or len(spans) != len(pictures):
        raise malformed(
            f"the messages hold {len(pictures)} images, their rendering {'other media' if spans is None else len(spans)}: "
            "a session can show images only, and the chat template must show each of them"
        )
    return tuple(
        ImageRef(picture.sha256, picture.uri, span.start, span.end)
        for picture, span in zip(pictures, spans, strict=True)
    )


def _move_images(rendered: Any, spans: Sequence[Span]) -> None:
    if not spans:
        return
    places = [
        replace(place, offset=span.start)
        for place, span in zip(rendered["mm_placeholders"]["image"], spans, strict=True)
    ]
    rendered["mm_placeholders"] = {**rendered["mm_placeholders"], "image": places}
