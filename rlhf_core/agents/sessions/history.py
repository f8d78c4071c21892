"""When are two conversations the same? What clients do to messages without meaning it must not matter.

A client sends the whole history with each request, rebuilt by its own library: content that was null comes back as "",
fields it does not know are dropped, JSON is re-spaced. The key of a message leaves such differences out.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Conversation:
    """A list of messages, told apart by digests. ``digests[k]`` stands for the first ``k`` messages."""

    digests: tuple[bytes, ...]

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, Any]], frame: Any = None) -> Conversation:
        """Read the messages as they are now.

        Args:
            messages: in OpenAI's chat format.
            frame: whatever else the prompt is made of (tools, options of the template), as JSON values.
        """
        return cls(_chained((_digest(b"", _canonical(frame)),), messages))

    def then(self, messages: Iterable[Mapping[str, Any]]) -> Conversation:
        """This conversation, continued."""
        return Conversation(_chained(self.digests, messages))

    def instead(self, messages: Iterable[Mapping[str, Any]]) -> Conversation:
        """Other messages in the same frame."""
        return Conversation(_chained(self.digests[:1], messages))

    def __len__(self) -> int:
        return len(self.digests) - 1

    @property
    def whole(self) -> bytes:
        """Stands for all its messages."""
        return self.digests[-1]


def _chained(digests: tuple[bytes, ...], messages: Iterable[Mapping[str, Any]]) -> tuple[bytes, ...]:
    chain = list(digests)
    for message in messages:
        chain.append(_digest(chain[-1], message_key(message)))
    return tuple(chain)


def message_key(message: Mapping[str, Any]) -> str:
    """What a message says: its role, content, tool calls and names.

    Left out: reasoning (templates strip it, clients drop it), ``refusal``, ``annotations``, ``audio`` and unknown fields; and
    the white space around what the assistant said, which many clients strip.
    """
    content = _content_key(message.get("content"))
    if message.get("role") == "assistant" and isinstance(content, str):
        content = content.strip()
    return _canonical(
        [
            message.get("role"),
            content,
            [_tool_call_key(call) for call in message.get("tool_calls") or ()],
            message.get("tool_call_id"),
            message.get("name"),
        ]
    )


def _content_key(content: Any) -> Any:
    """Text as a string, also where it came as one text part; other parts one by one."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = [_part_key(part) for part in content]
    kept = [part for part in parts if part is not None]
    if not kept:
        return ""
    return kept[0] if len(kept) == 1 and isinstance(kept[0], str) else kept


def _part_key(part: Any) -> Any:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text")
    if kind in ("text", "input_text", "output_text"):
        return part.get("text") or ""
    if kind in ("refusal", "thinking", "reasoning"):
        return None
    if part.get("uuid"):  # the server names an image by its pixels
        return [kind, part["uuid"]]
    return [kind, hashlib.sha256(_canonical(part).encode()).hexdigest()]


def _tool_call_key(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function") or call.get("custom") or {}
    arguments = function.get("arguments", function.get("input"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = ["not JSON", arguments]
    return [call.get("id"), function.get("name"), {} if arguments is None else arguments]


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)


def _digest(before: bytes, text: str) -> bytes:
    return hashlib.blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
