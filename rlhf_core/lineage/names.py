"""Metric names for trackers that refuse some characters.

MLflow accepts letters, digits and ``_ - . : /`` and space. Everything else is mapped, reversibly enough to be read:
``@`` becomes ``_at_``; any other character becomes ``_x`` and its code point in hex. ``val/mean@8`` is ``val/mean_at_8``,
``timing(s)/gen`` is ``timing_x28s_x29/gen``. MLflow also reads names as paths, and refuses those that a file system would
read as another: a dot that begins a part is mapped as above, an empty part becomes ``_``.
"""

from __future__ import annotations

import re

MAX_NAME = 250  # characters MLflow takes

_REFUSED = re.compile(r"[^A-Za-z0-9_\-.:/ ]|(?<![^/])\.")
_EMPTY_PART = re.compile(r"(?<![^/])(?=/|$)")


def metric_name(name: str) -> str:
    """The name under which MLflow accepts the metric."""
    plain = _REFUSED.sub(lambda match: "_at_" if match[0] == "@" else f"_x{ord(match[0]):x}", name)
    return _EMPTY_PART.sub("_", plain)[:MAX_NAME]
