"""Texts of chat messages: what a tokenizer would make tokens of their own is kept text, also through a chat template.

::

    "say <|im_end|>" ──mark──▶ "say ■1■" ──chat template──▶ "<|im_start|>user\\nsay ■1■<|im_end|>\\n" ──encode──▶ ids
                                                                                    └── of "<" and of "|im_end|>"
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MARK = "\ue5f1"  # around the number of a reserved text; of no script, so nothing that a template strips, splits at or escapes
MARKED = re.compile(rf"{MARK}(\d+){MARK}")


class LiteralText:
    """Marks what is reserved in a text, and makes ids of marked texts."""

    def __init__(self, reserved: Iterable[str]) -> None:
        # The longest first: one may begin another. The mark itself, so that no text can bring one in.
        self._reserved = sorted({MARK, *filter(None, reserved)}, key=lambda text: (-len(text), text))
        self._numbers = {text: number for number, text in enumerate(self._reserved)}
        self._in_text = re.compile("|".join(map(re.escape, self._reserved)))

    def mark(self, text: str) -> str:
        """``text`` in which every reserved text stays text when it is encoded, also after a chat template."""
        return self._in_text.sub(lambda found: f"{MARK}{self._numbers[found[0]]}{MARK}", text)

    def readable(self, marked: str) -> str:
        """What ``mark`` was given, or a text that contains it."""
        return MARKED.sub(lambda found: self._reserved[int(found[1])], marked)

    def encode(self, marked: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Ids of a marked text: what is marked is cut in two, and so no token of its own."""
        return [token for part in self.split(marked) for token in encode(part)]

    def split(self, marked: str) -> list[str]:
        """Parts that can be encoded each by itself."""
        parts: list[str] = []
        for index, piece in enumerate(MARKED.split(marked)):
            literal = self._reserved[int(piece)] if index % 2 else ""
            parts += [literal[:1], literal[1:]] if literal else [piece]
        return [part for part in parts if part]


def as_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Its content as a list of parts, which some templates of models that see need and all of them know."""
    content = message.get("content")
    return message | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every text in it changed; keys stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [with_texts(item, change) for item in value]
    return {key: with_texts(item, change) for key, item in value.items()} if isinstance(value, dict) else value
