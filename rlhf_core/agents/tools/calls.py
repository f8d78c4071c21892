"""The tool calls in what the policy said.

::

    hermes   <think>…</think> Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> <tool_call>…
    json     {"name": "add", "arguments": {"a": 1}}        several in a row, or in a list; text before them is allowed

A call that cannot be read is a call all the same, with its problem: the policy is told, and may learn. ``parameters`` is
taken for ``arguments``, since some models were taught to write so; arguments may be an object, or JSON text that holds one.
What a model thinks (before ``</think>``) is not said.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THOUGHT = "</think>"
_DECODER = json.JSONDecoder(strict=False)  # models put line breaks into strings as they are
_SPACE = re.compile(r"\s*")
_BETWEEN = re.compile(r"[\s;,]*")
_FENCE = re.compile(r"```(?:json)?\s*")
_LIKE_A_CALL = re.compile(r'(?:\[\s*)?\{\s*"(?:name|arguments|parameters|function|type)"')


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""  # why it cannot be run; '': nothing known yet


def find_calls(text: str, tool_format: str) -> list[ToolCall]:
    """All calls in a turn of the policy's, in order.

    Args:
        text: the turn.
        tool_format: ``agent.tool_format``, "hermes" or "json".
    """
    said = text.rpartition(THOUGHT)[2]
    return list(_hermes(said) if tool_format == "hermes" else _bare(said))


def _hermes(text: str) -> Iterator[ToolCall]:
    place = text.find(OPEN)
    while place >= 0:
        start = _SPACE.match(text, place + len(OPEN)).end()  # type: ignore[union-attr]  # matches anywhere
        value, end = _decoded(text, start)
        following = text.find(OPEN, end)
        stop = min((at for at in (text.find(CLOSE, end), following) if at >= 0), default=len(text))
        if isinstance(value, _Broken):
            yield ToolCall("", problem=f"the tool call is no JSON: {value.reason}")
        elif text[end:stop].strip():
            yield ToolCall("", problem=f"after the JSON of the tool call, {CLOSE} is expected")
        else:
            yield read_call(value)
        place = following


def _bare(text: str) -> Iterator[ToolCall]:
    start = _LIKE_A_CALL.search(_FENCE.sub(lambda fence: " " * len(fence[0]), text))
    if start is None:
        return
    place = start.start()
    while place < len(text) and text[place] in "{[":
        value, place = _decoded(text, place)
        if isinstance(value, _Broken):
            yield ToolCall("", problem=f"the tool call is no JSON: {value.reason}")
            return
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict) and ("name" in one or "function" in one):
                yield read_call(one)
        place = _BETWEEN.match(text, place).end()  # type: ignore[union-attr]


def read_call(value: Any) -> ToolCall:
    """The call that a JSON value is."""
    if not isinstance(value, dict):
        return ToolCall("", problem='a tool call is an object {"name": ..., "arguments": {...}}')
    if isinstance(value.get("function"), dict):  # as an OpenAI client shows it
        value = value["function"]
    name = value.get("name", value.get("function"))
    if not isinstance(name, str) or not name.strip():
        return ToolCall("", problem='the tool call has no "name"')
    name = name.strip()
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments, _ = _decoded(arguments.strip(), 0) if arguments.strip() else ({}, 0)
    if isinstance(arguments, _Broken):
        return ToolCall(name, problem=f'"arguments" is no JSON: {arguments.reason}')
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return ToolCall(name, problem='"arguments" must be an object with the parameters by name')
    return ToolCall(name, arguments)


@dataclass(frozen=True, slots=True)
class _Broken:
    reason: str


def _decoded(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at a place, and where it ends."""
    try:
        return _DECODER.raw_decode(text, start)
    except RecursionError:
        return _Broken("it is nested too deeply"), len(text)
    except json.JSONDecodeError as error:
        return _Broken(f"{error.msg} (character {error.pos - start})"), start
    except ValueError as error:  # an integer of more than 4300 digits
        return _Broken(str(error).partition(";")[0]), start
