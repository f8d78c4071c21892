"""Which images a prompt shows, and where in its messages.

::

    text + column of images                 ─┐
    messages with {"type": "image", …} parts ─┼─▶ messages of parts, an image part wherever one goes; the images in their order
    messages of text + column of images      ─┘

With a column of images, ``<image>`` in the prompt's own text says where they go, one for each; a text without any gets them in
front. In a row without images ``<image>`` is text like any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_core.data.templates import as_messages
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.data.templates import Messages

HERE = "<image>"  # in a text, whatever the model's own placeholder is
IMAGE_PART = {"type": "image"}
IMAGE_TYPES = ("image", "image_url")
OWN_SOURCE = ("image", "image_url", "url", "path", "base64")  # keys of a part that may hold its image


def images_of_column(value: Any) -> list[Any]:
    """The images of one row's column, which holds none, one, or a list."""
    if value is None or (isinstance(value, str | bytes | list | tuple) and not value):
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def as_parts(
    content: str | Messages, column: Sequence[Any], system_prompt: str | None, place: str
) -> tuple[Messages, list[Any]]:
    """The prompt as messages of parts, and the images that they show, in order.

    Args:
        content: The prompt: text, or chat messages.
        column: The images of the row's column.
        system_prompt: Put before a prompt of text.
        place: The row, for messages.

    Raises:
        DataError: the images of the column and the places for them differ in number.
    """
    messages = [message | _parts(message) for message in as_messages(content, system_prompt)]
    shown = [part for message in messages for part in _image_parts(message)]
    waiting = sum(_own_source(part) is None for part in shown)
    if column and not waiting:
        marked = sum(text.count(HERE) for message in messages for text in _texts(message))
        if marked:
            messages, waiting = [_with_marks_as_parts(message) for message in messages], marked
        else:
            messages, waiting = _in_front(messages, len(column), place), len(column)
    if waiting != len(column):
        raise DataError(
            f"{place}: the prompt has room for {waiting} images of its column, which has {len(column)}: give one for each "
            f"image part without a source of its own, or for each {HERE} in the text, or remove them all"
        )
    rest = iter(column)
    sources = []
    for message in messages:
        for part in _image_parts(message):
            own = _own_source(part)
            sources.append(next(rest) if own is None else own)
    return [_without_sources(message) for message in messages], sources


def shows_images(content: Any) -> bool:
    """True if the prompt's messages have image parts."""
    return not isinstance(content, str) and any(_image_parts(message) for message in content)


def _parts(message: dict[str, Any]) -> dict[str, Any]:
    """Text as one part; of parts only what is set: Arrow gives every part the keys of all."""
    content = message.get("content")
    if isinstance(content, str):
        return {"content": [{"type": "text", "text": content}]}
    if isinstance(content, list):
        kept = [
            {k: v for k, v in part.items() if v is not None} if isinstance(part, dict) else part for part in content
        ]
        return {"content": [{"type": "text", "text": part} if isinstance(part, str) else part for part in kept]}
    return {}


def _image_parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    if not isinstance(content, list):
        return []
    return [part for part in content if isinstance(part, dict) and part.get("type") in IMAGE_TYPES]


def _texts(message: dict[str, Any]) -> list[str]:
    """Of the prompt's author: what the policy or a tool said earlier marks nothing."""
    content = message.get("content")
    if message.get("role") not in ("user", "system") or not isinstance(content, list):
        return []
    return [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]


def _own_source(part: dict[str, Any]) -> Any:
    return next((part[key] for key in OWN_SOURCE if part.get(key)), None)


def _with_marks_as_parts(message: dict[str, Any]) -> dict[str, Any]:
    if not _texts(message):
        return message
    parts: list[Any] = []
    for part in message["content"]:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            parts.append(part)
            continue
        first, *others = part["text"].split(HERE)
        pieces = [first, *(piece for text in others for piece in (None, text))]
        parts += [IMAGE_PART if piece is None else part | {"text": piece} for piece in pieces if piece != ""]
    return message | {"content": parts}


def _in_front(messages: Messages, count: int, place: str) -> Messages:
    """Images before all else of the first turn of the user's."""
    for index, message in enumerate(messages):
        if message.get("role") == "user" and isinstance(message.get("content"), list):
            shown = message | {"content": [*[IMAGE_PART] * count, *message["content"]]}
            return [*messages[:index], shown, *messages[index + 1 :]]
    raise DataError(f"{place}: {count} images, and no message of the user's to show them in: add one")


def _without_sources(message: dict[str, Any]) -> dict[str, Any]:
    """An image is named by its content from here on, and a data URL is long."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {"content": [IMAGE_PART if part in _image_parts(message) else part for part in content]}
