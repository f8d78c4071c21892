"""A prompt and its answer as token ids, with the ranges of tokens that are trained.

    chat    ids = apply_chat_template(conversation)      <|im_start|>assistant\\n  h  o  <|im_end|>  \\n
                                                                                  x  x  x
    plain   ids = BOS + tokenise(prompt + answer) + EOS                Q  :  4  2  <|im_end|>
                                                                             x  x  x

**The answer ends with the token that ends it**, which is trained, so that the model learns to stop; white space that
the template writes behind it is not. Where the turns of a conversation stand is what the template itself says:

- a template with ``{% generation %}`` blocks marks them;
- otherwise turn i is what rendering ``messages[:i + 1]`` has beyond ``messages[:i]`` with the generation prompt. Both
  must open the rendering of the whole conversation: a template that rewrites earlier turns (strips their thinking)
  would train the model to say what it is never asked to say, and is refused with the row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.data.templates import Chat, as_messages, missing_bos
from rlhf_core.data.tokenised import tokenise
from rlhf_core.data.tokenizer import special_ids
from rlhf_core.errors import DataError
from rlhf_core.records import ActionRange

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from rlhf_core.config.supervised import SupervisedDataConfig
    from rlhf_core.data.templates import Messages
    from rlhf_core.data.tokenised import Tokenised
    from rlhf_core.data.tokenizer import Tokenizer

MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True, eq=False)
class Transcript:
    """A tokenised text and the tokens of it that are trained: a row of a batch. ``T`` = ``len(token_ids)``."""

    text: str  # for people: an end of sequence put behind plain text is not in it
    token_ids: NDArray[np.int32]  # [T]
    action_ranges: tuple[ActionRange, ...]  # what is trained

    @property
    def temperature(self) -> float:
        """Given answers are trained at the model's own distribution."""
        return 1.0

    @property
    def num_actions(self) -> int:
        """Tokens that are trained."""
        return sum(end - start for start, end in self.action_ranges)


def transcribe(
    prompt: str | Messages,
    answer: str | Messages,
    tools: list[Any] | None,
    data: SupervisedDataConfig,
    tokenizer: Tokenizer,
    place: str,
    *,
    whole: bool = False,
) -> Transcript:
    """Tokenise a prompt with its answer.

    Args:
        prompt: Text, or chat messages; empty where ``answer`` is the whole conversation or the whole text.
        answer: Text, or chat messages, whose assistant turns are trained.
        tools: Tool schemas for the chat template.
        data: Says which template applies.
        tokenizer: Of the model.
        place: The row, for messages.
        whole: Train on every token but the first.

    Raises:
        DataError: The chat template refuses the messages or rewrites them, messages or tools come without a chat
            template, or the answer has no token of its own.
    """
    if data.apply_chat_template:
        opening = as_messages(prompt, data.system_prompt) if prompt else []
        turns = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        chat = Chat(tokenizer, data.tokenizer_chat_template, tools, place)
        return _chat_transcript([*opening, *turns], len(opening), chat, whole)
    if not isinstance(prompt, str) or not isinstance(answer, str):
        raise DataError(f"{place}: a list of chat messages needs data.apply_chat_template=true")
    if tools:
        raise DataError(f"{place}: tools need data.apply_chat_template=true; to leave them out, rename the column")
    # replace, not format: every other brace of the template stays as it is
    framed = prompt if data.input_template is None else data.input_template.replace("{}", prompt)
    return _plain_transcript(framed, answer, tokenizer, place, whole)


def _plain_transcript(prompt: str, answer: str, tokenizer: Tokenizer, place: str, whole: bool) -> Transcript:
    tokenised = tokenise(prompt + answer, tokenizer)
    bos = missing_bos(tokenised.token_ids, tokenizer)
    start = len(bos) + tokenised.token_at(len(prompt), place)
    token_ids = [*bos, *tokenised.token_ids]
    if start >= len(token_ids):
        raise DataError(
            f"{place}: the answer {answer!r} is part of the prompt's last token: end the prompt with a space"
        )
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"{place}: the tokenizer has no end-of-sequence token to end the answer with: name one as eos_token in its "
            "tokenizer_config.json, or set data.apply_chat_template=true"
        )
    if token_ids[-1] != tokenizer.eos_token_id:
        token_ids.append(tokenizer.eos_token_id)
    return _transcript(tokenised.text, token_ids, [(0 if whole else start, len(token_ids))])


def _chat_transcript(messages: Messages, first: int, chat: Chat, whole: bool) -> Transcript:
    """The turns from message ``first`` on are trained."""
    tokenised = tokenise(chat.text(messages, generation_prompt=False), chat.tokenizer)
    if tokenised.token_ids != chat.token_ids(messages, generation_prompt=False):
        raise DataError(
            f"{chat.place}: the tokenizer's apply_chat_template gives other ids than its rendered text: use a tokenizer "
            "of transformers without a method of its own"
        )
    if whole:
        spans = [(0, len(tokenised.token_ids))]
    elif MARKED.search(chat.tokenizer.get_chat_template(chat.template, chat.tools)):
        spans = list(_marked_turns(tokenised, messages, first, chat))
    else:
        spans = list(_turns_by_prefix(tokenised, messages, first, chat))
    if any(start == end for start, end in spans) or not spans:
        raise DataError(f"{chat.place}: an assistant turn has no token of its own in {tokenised.text!r}: repair it")
    return _transcript(tokenised.text, tokenised.token_ids, spans)


def _transcript(text: str, token_ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> Transcript:
    ranges = (ActionRange(max(start, 1), end) for start, end in spans)  # no token precedes token 0
    return Transcript(text, np.array(token_ids, dtype=np.int32), tuple(r for r in ranges if r.start < r.end))


def _marked_turns(tokenised: Tokenised, messages: Messages, first: int, chat: Chat) -> Iterator[tuple[int, int]]:
    """Tokens of each ``{% generation %}`` block from message ``first`` on."""
    # Not return_assistant_tokens_mask itself: where offsets are trimmed (Llama 3), a block that begins or ends with a
    # space loses all later turns from that mask, or adds every token behind it. Its characters are right.
    from transformers.utils.chat_template_utils import render_jinja_template

    _, blocks = render_jinja_template(
        conversations=[messages],
        tools=chat.tools,
        chat_template=chat.tokenizer.get_chat_template(chat.template, chat.tools),
        return_assistant_tokens_mask=True,
        **chat.tokenizer.special_tokens_map,
    )
    prompt_end = len(_opening(tokenised.text, messages, first, chat)) if first else 0
    for start, end in blocks[0]:
        if start >= prompt_end:
            yield tokenised.token_at(start, chat.place), tokenised.token_at(end, chat.place)


def _turns_by_prefix(tokenised: Tokenised, messages: Messages, first: int, chat: Chat) -> Iterator[tuple[int, int]]:
    """Tokens of each assistant turn from message ``first`` on."""
    special = special_ids(chat.tokenizer)
    for index, message in enumerate(messages):
        if index >= first and message["role"] == "assistant":
            start = len(_opening(tokenised.text, messages, index, chat))
            end = len(_opening(tokenised.text, messages, index + 1, chat, closed=True))
            tokens = tokenised.token_at(start, chat.place), tokenised.token_at(end, chat.place)
            yield tokens[0], _without_tail(tokenised, *tokens, special)


def _opening(text: str, messages: Messages, count: int, chat: Chat, *, closed: bool = False) -> str:
    """The first ``count`` messages as they stand in ``text``: up to the answer to come, or ``closed`` behind the last."""
    if closed and count == len(messages):
        return text
    rendered = chat.text(messages[:count], generation_prompt=not closed)
    # some templates (Phi 3's) end a whole conversation with the end of sequence
    candidates = [rendered, rendered.removesuffix(chat.tokenizer.eos_token or "")] if closed else [rendered]
    for candidate in candidates:
        if text.startswith(candidate):
            return candidate
    raise DataError(
        f"{chat.place}: the chat template renders the first {count} of {len(messages)} messages otherwise when more "
        "follow (as templates do that strip the thinking of earlier turns): give one row per answer (the turns before it "
        "in data.input_key, the answer in data.output_key), or set data.tokenizer_chat_template to a template with "
        "{% generation %} blocks that leaves earlier turns as they are"
    )


def _without_tail(tokenised: Tokenised, start: int, end: int, special: set[int]) -> int:
    """The end of a turn: behind the special tokens that close it, before white space that follows them.

    A turn that no special token closes is trained whole: there its white space is what ends it.
    """
    ids = tokenised.token_ids

    def is_blank(token: int) -> bool:
        return not tokenised.tokenizer.decode([token]).strip()

    last = end
    while last > start and (ids[last - 1] in special or is_blank(ids[last - 1])):
        last -= 1
    closing = next((index for index in range(last, end) if ids[index] in special), None)
    if closing is None:
        return end
    return next((index for index in range(closing, end) if ids[index] not in special), end)
