"""Tools in prompts: those of ``agent.tools`` or the row's own, and a chat template that knows what to do with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_core.data import columns
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rlhf_core.config.model import DataConfig
    from rlhf_core.data.templates import Chat, Messages, RenderedPrompt
    from rlhf_core.data.values import Row

_CALL_ID = "call00000"  # nine letters and digits, as the strictest templates want them
_REMEDY = "set data.tokenizer_chat_template to a template that does"


def row_tools(row: Row, data: DataConfig, tools: Sequence[Any]) -> list[Any] | None:
    """The tool schemas of a row: ``tools`` for all, or its own; ``DataError`` if both."""
    own = columns.tools(row, data.tools_key)
    if own and tools:
        raise DataError(
            f"{row.place}: column {data.tools_key!r} holds tools, and agent.tools gives others, which alone are run: remove "
            "the column, or set data.tools_key to another name"
        )
    return own or list(tools) or None


def check_shown(rendered: Callable[[list[Any] | None], RenderedPrompt], tools: Sequence[Any], place: str) -> None:
    """A policy that is not told of its tools never calls them, and nobody notices.

    Args:
        rendered: Renders a prompt with tools, or without any.
        tools: Schemas.
        place: The prompt's, for messages.

    Raises:
        DataError: The prompt neither shows the tools nor names them.
    """
    text = rendered(list(tools)).text
    names = [tool["function"]["name"] for tool in tools]
    if text == rendered(None).text and not all(name in text for name in names):
        raise DataError(
            f"{place}: the chat template does not show the policy its tools ({', '.join(names)}): {_REMEDY}, or describe them "
            "in data.system_prompt"
        )


def check_results_told(chat: Chat, messages: Messages, name: str) -> None:
    """A template that refuses what tools return would fail every sample that calls one.

    Args:
        chat: The template at work.
        messages: Of a prompt.
        name: Of a tool.

    Raises:
        DataError: It does, or leaves it out.
    """
    result = {"role": "tool", "tool_call_id": _CALL_ID, "name": name, "content": "RESULT7f3a"}
    call = {"id": _CALL_ID, "type": "function", "function": {"name": name, "arguments": {}}}
    answer = {"role": "assistant", "content": "a"}
    problem = ""
    for said in (answer | {"tool_calls": [call]}, answer):
        try:
            if result["content"] in chat.text([*messages, said, result], generation_prompt=True):
                return
        except DataError as error:
            problem = problem or f" ({error.__cause__})"
    raise DataError(f"{chat.place}: the chat template does not tell what a tool returned{problem}: {_REMEDY}")
