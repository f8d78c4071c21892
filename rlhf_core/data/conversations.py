"""From rows to the examples of supervised training.

    SFT           data.input_key + data.output_key               text or messages, then the answer; the answer is trained
                  data.input_key alone                           a whole conversation; every assistant turn is trained
    preferences   data.prompt_key + chosen + rejected            two answers to one prompt
                  chosen + rejected                              two conversations that begin with the same messages

A preference example holds two transcripts of the same prompt, whose ranges are the answers' tokens.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.data import columns
from rlhf_core.data.transcripts import Transcript, transcribe
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from rlhf_core.config.supervised import SupervisedDataConfig
    from rlhf_core.data.templates import Messages
    from rlhf_core.data.tokenizer import Tokenizer
    from rlhf_core.data.values import Row

TOOLS_COLUMN = "tools"  # as data.tools_key of a run by rewards
IMAGES_COLUMN = "images"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SftExample(Transcript):
    """One row of SFT."""

    row_id: str
    datasource: str


@dataclass(frozen=True, slots=True, eq=False)
class PreferenceExample:
    """One pair of answers to one prompt."""

    row_id: str
    datasource: str
    chosen: Transcript
    rejected: Transcript
    margin: float  # by how much chosen is better; 0 without ``data.margin_key``


def sft_example(
    row: Row, source: str, data: SupervisedDataConfig, tokenizer: Tokenizer, *, train_on_prompt: bool = False
) -> SftExample:
    """The example of one row.

    Args:
        row: The row.
        source: Name of its dataset.
        data: Columns and templates.
        tokenizer: Of the model.
        train_on_prompt: ``sft.train_on_prompt``.

    Raises:
        DataError: A column is missing, blank or of another type, or the row cannot be tokenised as ``transcribe`` says.
    """
    content = _content(row, data.input_key, "data.input_key", "prompt")
    if data.output_key is not None:
        prompt, answer = content, _answer(row, data.output_key, "data.output_key")
    else:
        _check_whole(content, row, data, train_on_prompt)
        prompt, answer = "", content
    transcript = transcribe(prompt, answer, _tools(row), data, tokenizer, row.place, whole=train_on_prompt)
    return SftExample(
        text=transcript.text,
        token_ids=transcript.token_ids,
        action_ranges=transcript.action_ranges,
        row_id=columns.row_id(row, source, data.id_key),
        datasource=columns.datasource(row, source),
    )


def preference_example(row: Row, source: str, data: SupervisedDataConfig, tokenizer: Tokenizer) -> PreferenceExample:
    """The pair of one row; arguments and errors as ``sft_example``."""
    prompt, chosen, rejected = _pair(row, data)
    tools = _tools(row)
    return PreferenceExample(
        row_id=columns.row_id(row, source, data.id_key),
        datasource=columns.datasource(row, source),
        chosen=transcribe(prompt, chosen, tools, data, tokenizer, row.place),
        rejected=transcribe(prompt, rejected, tools, data, tokenizer, row.place),
        margin=_margin(row, data.margin_key),
    )


def _pair(row: Row, data: SupervisedDataConfig) -> tuple[str | Messages, str | Messages, str | Messages]:
    """(prompt, chosen, rejected)."""
    if data.prompt_key is None:
        return _split_conversations(row, data)
    prompt = _content(row, data.prompt_key, "data.prompt_key", "prompt")
    chosen = _answer(row, data.chosen_key, "data.chosen_key")
    rejected = _answer(row, data.rejected_key, "data.rejected_key")
    _check_different(chosen, rejected, row, data)
    return prompt, chosen, rejected


def _split_conversations(row: Row, data: SupervisedDataConfig) -> tuple[Messages, Messages, Messages]:
    conversations: list[Messages] = []
    for name, key in ((data.chosen_key, "data.chosen_key"), (data.rejected_key, "data.rejected_key")):
        content = _content(row, name, key, "conversation")
        if isinstance(content, str):
            raise DataError(
                f"{row.place}: column {name!r} holds text, but data.prompt_key=null asks for whole conversations, lists "
                "of chat messages: name the prompt's column in data.prompt_key"
            )
        conversations.append(content)
    chosen, rejected = conversations
    _check_different(chosen, rejected, row, data)
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    count = sum(1 for _ in pairs)
    prompt = chosen[:count]
    _check_prompt(prompt, row, f"columns {data.chosen_key!r} and {data.rejected_key!r} share")
    for name, conversation in ((data.chosen_key, chosen), (data.rejected_key, rejected)):
        _check_turns(conversation[count:], name, row.place, "let both conversations part at an answer")
    return prompt, chosen[count:], rejected[count:]


def _check_different(chosen: Any, rejected: Any, row: Row, data: SupervisedDataConfig) -> None:
    if chosen == rejected:
        raise DataError(
            f"{row.place}: columns {data.chosen_key!r} and {data.rejected_key!r} are equal, so neither is better: remove "
            "the row"
        )


def _check_whole(content: str | Messages, row: Row, data: SupervisedDataConfig, train_on_prompt: bool) -> None:
    """Refuse what is no conversation; plain text may stand for one where every token is trained."""
    if isinstance(content, str):
        if not train_on_prompt or data.apply_chat_template or data.input_template is not None:
            raise DataError(
                f"{row.place}: column {data.input_key!r} holds text, but data.output_key=null asks for a whole "
                "conversation, a list of chat messages: name the answer's column in data.output_key, or train on plain "
                "text with sft.train_on_prompt=true and no template"
            )
        return
    _check_prompt(content[:1], row, f"column {data.input_key!r} begins with")
    if not any(message["role"] == "assistant" for message in content):
        raise DataError(
            f"{row.place}: column {data.input_key!r} has no assistant turn to train: add one, or remove the row"
        )
    _refuse_empty_turns(content, data.input_key, row.place)


def _check_prompt(messages: Messages, row: Row, what: str) -> None:
    if not messages or messages[0]["role"] == "assistant":
        found = "an assistant turn" if messages else "no message"
        raise DataError(f"{row.place}: {what} {found}, so there is nothing to answer: put the user's turn before it")


def _answer(row: Row, name: str, key: str) -> str | Messages:
    answer = _content(row, name, key, "answer")
    if not isinstance(answer, str):
        remedy = (
            "leave the prompt out of it; for whole conversations set data.prompt_key (SFT: data.output_key) to null"
        )
        _check_turns(answer, name, row.place, remedy)
    return answer


def _check_turns(messages: Messages, name: str, place: str, remedy: str) -> None:
    """Messages that answer a prompt begin with an assistant turn."""
    if not messages or messages[0]["role"] != "assistant":
        found = f"a turn of {messages[0]['role']!r}" if messages else "nothing"
        raise DataError(
            f"{place}: column {name!r} has {found} behind the prompt instead of an assistant turn: {remedy}"
        )
    _refuse_empty_turns(messages, name, place)


def _refuse_empty_turns(messages: Messages, name: str, place: str) -> None:
    for number, message in enumerate(messages):
        spoken = not columns.is_blank(message.get("content")) or message.get("tool_calls")
        if message["role"] == "assistant" and not spoken:
            raise DataError(
                f"{place}: column {name!r}: the assistant turn in message {number} is empty: fill it, or remove the row"
            )


def _content(row: Row, name: str, key: str, noun: str) -> str | Messages:
    content = columns.text_or_messages(row, name, key, noun)
    for part in [] if isinstance(content, str) else _parts(content):
        if isinstance(part, dict) and part.get("type", "text") != "text":
            raise DataError(
                f"{row.place}: column {name!r} holds a part of type {part['type']!r}, and supervised training reads text "
                "only: remove the row"
            )
    return content


def _parts(messages: Messages) -> list[Any]:
    """The parts of all contents that are lists of them."""
    contents = (message.get("content") for message in messages)
    return [part for content in contents if isinstance(content, list) for part in content]


def _tools(row: Row) -> list[Any] | None:
    if row.values.get(IMAGES_COLUMN):
        raise DataError(
            f"{row.place}: column {IMAGES_COLUMN!r} holds images, and supervised training reads text only: remove it"
        )
    return columns.tools(row, TOOLS_COLUMN)


def _margin(row: Row, name: str | None) -> float:
    if name is None:
        return 0.0
    margin = columns.column(row, name, "data.margin_key", "name the margin's column, or set it to null for none")
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise DataError(f"{row.place}: column {name!r} holds the margin {margin!r}: write a finite number")
    return float(margin)
