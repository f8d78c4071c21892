"""JSON that carries bytes (images are PNG files) and numbers of numpy or torch.

::

    {"image": b"\\x89PNG", "reward": torch.tensor(1.0)}  ──▶  {"image": {"$bytes": "iVBORw=="}, "reward": 1.0}
"""

from __future__ import annotations

import base64
import json
import math
from typing import Any

from rlhf_core.processes.wire import frame

MAX_SHOWN = 60  # characters of an offending value in a message
BYTES = "$bytes"  # the key of a dictionary that stands for bytes
_BYTES_IN_JSON = f"{json.dumps(BYTES)}:"  # only a key is followed by a colon: quotes inside a text are escaped


def encode_values(message: Any) -> bytes:
    """The frame of a message; arrays and tensors become lists or numbers.

    Raises:
        TypeError: something in it is neither JSON nor bytes nor an array.
        ValueError: it contains itself, or a dictionary has the key ``$bytes``.
    """
    packed = 0

    def pack(value: Any) -> Any:
        nonlocal packed
        if isinstance(value, bytes | bytearray | memoryview):
            packed += 1
            return {BYTES: base64.b64encode(value).decode("ascii")}
        to_list = getattr(value, "tolist", None)
        if callable(to_list):
            return to_list()
        raise TypeError(f"a value of type {type(value).__name__} is neither JSON nor bytes")

    text = json.dumps(message, default=pack)
    if text.count(_BYTES_IN_JSON) != packed:
        raise ValueError(f"the key {BYTES!r} of a dictionary stands for bytes: give it another name")
    return frame(text)


def decode_values(body: bytes | bytearray) -> Any:
    """The message of a frame's body."""
    return json.loads(body, object_hook=_unpack)


def finite(number: int | float) -> float:
    """A number of the user's as a finite float; ``ValueError`` says what it is instead."""
    try:
        found = float(number)
    except OverflowError:
        raise ValueError("an integer beyond the range of float") from None
    if not math.isfinite(found):
        raise ValueError(str(found))
    return found


def shown(value: Any) -> str:
    """A value of the user's, for messages."""
    if value is None:
        return "None"
    text = repr(value)
    return f"the {type(value).__name__} {text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + '…'}"


def _unpack(found: dict[str, Any]) -> Any:
    return base64.b64decode(found[BYTES]) if BYTES in found else found
