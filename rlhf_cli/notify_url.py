"""The URL of the webhook that hears of runs that end badly. It is a secret: no message says it."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

NOTIFY_URL = "RLHF_NOTIFY_URL"


def notify_url(environment: Mapping[str, str]) -> str | None:
    """That of the environment; None where it is unset or empty.

    Raises:
        ConfigError: it is no URL.
    """
    url = environment.get(NOTIFY_URL, "")
    return checked_url(url, NOTIFY_URL) if url else None


def checked_url(url: str, place: str) -> str:
    """The URL, if a webhook can have it.

    Args:
        url: a secret.
        place: where it stands, for the message.

    Raises:
        ConfigError: it is none.
    """
    try:
        parsed = urlsplit(url)
        port = parsed.port  # raises where it is none
        good = (
            parsed.scheme in ("http", "https")
            and bool(parsed.hostname)
            and port != 0
            and url.isascii()
            and " " not in url
        )
    except ValueError:
        good = False
    if not good:
        raise ConfigError(
            f"{place} is not the URL of a webhook (its value is not shown): give https://host/path, as the chat gives it, or "
            "unset it"
        )
    return url
