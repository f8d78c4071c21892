"""What follows a turn of the policy's in a chat: the next messages as the chat template writes them behind it.

The sampled tokens are never rendered again. A short stand-in conversation is, and what follows the policy's turn in it is
taken over::

    [user 'u', assistant SENTINEL, *new messages] ──template──▶ …assistant\\nSENTINEL<|im_end|>\\n<|im_start|>user\\n…
                                                                                     └───────── the bridge ─────────
    the turn ended with <|im_end|>           ──▶ the bridge without its first token, which was sampled
    with another token that ends turns       ──▶ the same: a turn is closed once
    it was cut off, or stopped by a string   ──▶ the whole bridge: the closing token was not the policy's

So the separator of turns is there, and the ids are those of rendering the whole conversation, wherever the sampled ones are.
What special tokens the messages spell is the caller's concern (``chat_text.py``).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.chat_text import as_parts

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from rlhf_core.agents.episode import Tokenizer

    Messages = list[dict[str, Any]]

SENTINEL = "ANSWER7f3a"  # plain letters and digits: nothing that a template strips, splits at or escapes
OTHER_CONTENT = "CONTENT7f3a"  # in the place of a message's own
CALL_ID = "call00000"  # nine letters and digits, as the strictest templates want them


@dataclass(frozen=True, slots=True)
class Bridge:
    """The text behind a turn. It begins with the token that closes a turn, where the template has one."""

    text: str
    closed_by: frozenset[int] = (
        frozenset()
    )  # a turn that ends with one of these ids has the first token itself, or its like

    def already_said(self, last_id: int) -> int:
        """How many of the bridge's first tokens the turn has itself, given its last token: 0 or 1."""
        return int(last_id in self.closed_by)


def make_bridge(
    tokenizer: Tokenizer,
    messages: Sequence[dict[str, Any]],
    end_ids: Collection[int],
    *,
    template: str | None = None,
    tools: list[Any] | None = None,
    options: dict[str, Any] | None = None,
) -> Bridge | None:
    """The bridge from a turn of the policy's, over new messages, to its next turn.

    Args:
        tokenizer: of the policy.
        messages: what was said after the turn: user and tool messages, at least one.
        end_ids: every token id that ends a turn (``data.end_of_sequence_ids``).
        template: replaces the tokenizer's own.
        tools: tool schemas, as the prompt was rendered with.
        options: further arguments of the template.

    Returns:
        None where the template does not allow it: the caller renders the conversation anew, as a new segment.
    """
    template_of = _Template(tokenizer, {"chat_template": template, "tools": tools, **(options or {})})
    sentinel = _sentinel(messages)
    for calls in _stand_in_calls(messages):
        for stand_in in _stand_ins(sentinel, calls, messages):
            bridge = _cut(template_of, stand_in, sentinel, messages, end_ids)
            if bridge is not None:
                return bridge
    return None


def bridge_ids(
    tokenizer: Tokenizer, last_id: int, messages: Sequence[dict[str, Any]], end_ids: Collection[int], **options: Any
) -> list[int] | None:
    """Token ids that follow a turn whose last token is ``last_id``; arguments and None as in ``make_bridge``. Text only."""
    bridge = make_bridge(tokenizer, messages, end_ids, **options)
    if bridge is None:
        return None
    return tokenizer.encode(bridge.text, add_special_tokens=False)[bridge.already_said(last_id) :]


def _stand_in_calls(messages: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The tool calls to put into the stand-in turn, in the order in which they are tried.

    Many templates refuse the result of a tool that nobody called.
    """
    calls: list[dict[str, Any]] = []
    for message in messages:
        if message.get("role") != "tool":
            break
        name = message.get("name") or "f"
        call_id = message.get("tool_call_id") or CALL_ID
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": {}}})
    return [calls, []] if calls else [[]]


def _stand_ins(sentinel: str, calls: list[dict[str, Any]], messages: Sequence[dict[str, Any]]) -> Iterator[Messages]:
    """A question and the policy's turn; as parts too where the messages are: some templates want all of them so."""
    answer: dict[str, Any] = {"role": "assistant", "content": sentinel}
    turns: Messages = [{"role": "user", "content": "u"}, answer | ({"tool_calls": calls} if calls else {})]
    yield turns
    if any(isinstance(message.get("content"), list) for message in messages):
        yield [as_parts(turn) for turn in turns]


def _sentinel(messages: Sequence[dict[str, Any]]) -> str:
    """A text that stands in none of the messages."""
    said, sentinel = str(messages), SENTINEL
    while sentinel in said:
        sentinel += "f"
    return sentinel


class _Template:
    """A chat template with its options."""

    def __init__(self, tokenizer: Tokenizer, options: dict[str, Any]) -> None:
        self.tokenizer = tokenizer
        self._options = options

    def behind(self, sentinel: str, messages: Messages, *, generation_prompt: bool = True) -> str | None:
        """What is rendered behind the sentinel; None where the template refuses the messages or hides it."""
        from jinja2 import TemplateError

        options = {"tokenize": False, "add_generation_prompt": generation_prompt, **self._options}
        try:
            text: str = self.tokenizer.apply_chat_template(messages, **options)
        except (TemplateError, TypeError, ValueError, KeyError):
            return None
        return text.rpartition(sentinel)[2] if sentinel in text else None

    def text(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id], skip_special_tokens=False) or "\0"  # one without text is found nowhere


def _cut(
    template: _Template,
    stand_in: Messages,
    sentinel: str,
    messages: Sequence[dict[str, Any]],
    end_ids: Collection[int],
) -> Bridge | None:
    """The bridge in what follows the sentinel."""
    tail = template.behind(sentinel, [*stand_in, *messages])
    if tail is None:
        return None
    found = [(place, end_id) for end_id in end_ids if (place := tail.find(template.text(end_id))) >= 0]
    place, end_id = min(found, default=(-1, -1))
    if place < 0 or place >= _start_of_content(template, stand_in, sentinel, messages, tail):
        # No token closes the policy's turn. Where it made calls, nobody can say where they end.
        return None if "tool_calls" in stand_in[-1] else Bridge(tail)
    text = tail[place:]
    if template.tokenizer.encode(text, add_special_tokens=False)[:1] != [end_id]:
        return None
    closing = template.text(end_id) in (template.behind(sentinel, stand_in, generation_prompt=False) or "")
    # Else the token is the next turn's header, at which the model stops: another end of a turn does not replace it.
    return Bridge(text, frozenset(end_ids) if closing else frozenset([end_id]))


def _start_of_content(
    template: _Template, stand_in: Messages, sentinel: str, messages: Sequence[dict[str, Any]], tail: str
) -> int:
    """Where the first message's own text begins in ``tail``: an end-of-turn token in it closes no turn of the policy's.

    Up to there the tail does not depend on that text.
    """
    if not messages:
        return len(tail)
    other = template.behind(sentinel, [*stand_in, messages[0] | {"content": OTHER_CONTENT}, *messages[1:]])
    if other is None:
        return len(tail)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tail, other, strict=False))
    return sum(1 for _ in same)
