"""Messages between processes: 8 bytes of length (big-endian), then JSON in ASCII.

JSON, not pickle: nothing a worker sends can run code in the controller, and text with lone surrogates survives.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

_LENGTH = struct.Struct(">Q")
MAX_MESSAGE = 1 << 31  # bytes; a longer one is a stray write into the channel, not a message
CHUNK = 1 << 16


def encode(message: Any) -> bytes:
    """The frame of a message. ``TypeError`` or ``ValueError`` if it is not JSON."""
    return frame(json.dumps(message))


def frame(text: str) -> bytes:
    """The frame of a message that is JSON in ASCII already."""
    body = text.encode("ascii")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Collects one message from the pieces in which it arrives; ``parse`` turns its bytes into the message."""

    def __init__(self, parse: Callable[[bytearray], Any] = json.loads) -> None:
        self._data = bytearray()
        self._parse = parse

    def feed(self, piece: bytes) -> Any:
        """The message once it is whole, else None. ``ValueError`` if the bytes are no message."""
        self._data += piece
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        if length > MAX_MESSAGE:
            raise ValueError(f"a frame of {length} bytes")
        if len(self._data) < _LENGTH.size + length:
            return None
        return self._parse(self._data[_LENGTH.size :])


def receive(channel: socket.socket) -> Any:
    """The next message of a blocking socket; None if the other side closed it."""
    reader = FrameReader()
    while piece := channel.recv(CHUNK):
        message = reader.feed(piece)
        if message is not None:
            return message
    return None
