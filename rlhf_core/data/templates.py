"""From the content of a row to the text and the token ids that the engine gets.

    messages, or text with data.apply_chat_template ──▶ chat template ──▶ text, ids      (no token is added to it)
    text with data.input_template ──▶ "Q: {}\\nA:" ──▶ text ──▶ ids, one BOS             (if the tokenizer adds one)
    text ──▶ text ──▶ ids, one BOS
    any of them, for a model that sees ──▶ text with a placeholder for each image ──▶ ids with the room that each needs

The ids made here are the ids that are trained on: text is never tokenised again.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.chat_text import as_parts, with_texts
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rlhf_core.config.model import DataConfig
    from rlhf_core.data.tokenizer import Tokenizer
    from rlhf_core.vision import ImageSpan, VisionProcessor

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt in the three forms that are needed of it."""

    text: str
    token_ids: list[int]  # [T]
    messages: Messages | None  # as the chat template got them; None without one
    spans: tuple[ImageSpan, ...] = ()  # of the images in ``token_ids``


@dataclass(frozen=True, slots=True)
class Sight:
    """The images of one prompt, and the model's way to see them."""

    processor: VisionProcessor
    sizes: Sequence[tuple[int, int]] = ()  # (width, height) of each, in the order of the messages' image parts


def render(
    content: str | Messages,
    tools: list[Any] | None,
    data: DataConfig,
    tokenizer: Tokenizer,
    place: str,
    sight: Sight | None = None,
) -> RenderedPrompt:
    """Render one row.

    Args:
        content: The prompt: text, or chat messages.
        tools: Tool schemas for the chat template.
        data: Says which template applies.
        tokenizer: Of the policy.
        place: The row, for messages.
        sight: The images; None: the model reads text only.

    Raises:
        DataError: The chat template refuses the messages or leaves an image out, or messages come without a chat template.
    """
    if data.apply_chat_template:
        if sight is not None:
            return _render_seen(content, tools, data, tokenizer, place, sight)
        return _render_chat(content, tools, data, tokenizer, place)
    if not isinstance(content, str):
        raise DataError(f"{place}: a list of chat messages needs data.apply_chat_template=true")
    if tools:
        raise DataError(
            f"{place}: tools need data.apply_chat_template=true; to leave them out, set data.tools_key to a column "
            "that does not exist"
        )
    # replace, not format: every other brace of the template stays as it is
    text = content if data.input_template is None else data.input_template.replace("{}", content)
    if sight is not None:  # nothing of it is an image: those need a chat template
        token_ids = sight.processor.tokenise_sizes(sight.processor.literal(text), (), place).token_ids
        return RenderedPrompt(text, [*missing_bos(token_ids, tokenizer), *token_ids], None)
    return RenderedPrompt(text, plain_token_ids(text, tokenizer), None)


def plain_token_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    """Token ids of ``text``: one BOS where the tokenizer adds one and the text has none yet; never an EOS behind it."""
    token_ids = list(tokenizer.encode(text, add_special_tokens=False))
    return [*missing_bos(token_ids, tokenizer), *token_ids]


def missing_bos(token_ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """The BOS to put before ``token_ids``; nothing where they have one, or the tokenizer adds none."""
    bos = tokenizer.bos_token_id
    if bos is None or token_ids[:1] == [bos] or tokenizer.encode("a")[:1] != [bos]:
        return []
    return [bos]


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat template at work on one row."""

    tokenizer: Tokenizer
    template: str | None  # None: the tokenizer's own
    tools: list[Any] | None
    place: str  # the row, for messages

    def text(self, messages: Messages, *, generation_prompt: bool) -> str:
        """The rendered messages, with or without the header of the answer to come."""
        with self._refusals(generation_prompt):
            text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, **self._options(generation_prompt))
            return text

    def token_ids(self, messages: Messages, *, generation_prompt: bool) -> list[int]:
        """The same as token ids."""
        with self._refusals(generation_prompt):
            return list(
                self.tokenizer.apply_chat_template(
                    messages, tokenize=True, return_dict=False, **self._options(generation_prompt)
                )
            )

    def _options(self, generation_prompt: bool) -> dict[str, Any]:
        return {
            "tools": self.tools,
            "chat_template": self.template,
            "add_generation_prompt": generation_prompt,
        }

    @contextlib.contextmanager
    def _refusals(self, generation_prompt: bool) -> Iterator[None]:
        from jinja2 import TemplateError

        try:
            yield
        except (TemplateError, TypeError, ValueError) as error:
            noun = "prompt" if generation_prompt else "conversation"
            raise DataError(
                f"{self.place}: the chat template refuses the {noun}: {error}; repair its messages, or set "
                "data.tokenizer_chat_template"
            ) from error


def as_messages(prompt: str | Messages, system_prompt: str | None) -> Messages:
    """A prompt of text as a user turn behind the system prompt; messages as they are."""
    if not isinstance(prompt, str):
        return prompt
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return [*system, {"role": "user", "content": prompt}]


def _render_chat(
    content: str | Messages, tools: list[Any] | None, data: DataConfig, tokenizer: Tokenizer, place: str
) -> RenderedPrompt:
    chat = Chat(tokenizer, data.tokenizer_chat_template, tools, place)
    messages = as_messages(content, data.system_prompt)
    return RenderedPrompt(
        text=chat.text(messages, generation_prompt=True),
        token_ids=chat.token_ids(messages, generation_prompt=True),
        messages=messages,
    )


def _render_seen(
    content: str | Messages, tools: list[Any] | None, data: DataConfig, tokenizer: Tokenizer, place: str, sight: Sight
) -> RenderedPrompt:
    """Only what the chat template writes for an image part becomes an image; the same words in a text stay text."""
    processor = sight.processor
    own_tools = None if tools is None else with_texts(tools, processor.literal)
    chat = Chat(tokenizer, data.tokenizer_chat_template or processor.chat_template, own_tools, place)
    messages = [as_parts(message) for message in as_messages(content, data.system_prompt)]
    text = chat.text(with_texts(messages, processor.literal), generation_prompt=True)
    if processor.count(text) != len(sight.sizes):
        raise DataError(
            f"{place}: the chat template writes {processor.count(text)} placeholders ({processor.placeholder}) for the "
            f"prompt's {len(sight.sizes)} images: set data.tokenizer_chat_template to one that knows image parts"
        )
    token_ids, spans = processor.tokenise_sizes(text, sight.sizes, place)
    return RenderedPrompt(processor.readable(text), token_ids, messages, tuple(spans))
