"""Secrets in texts for people are masked: in errors, logs, and the failures that a run records.

::

    values of environment variables whose names say that they are secret   $HF_TOKEN, $AWS_SECRET_ACCESS_KEY …  ┐
    values from Prefect's Secret blocks, as ``remember`` was told          run.secrets                          ├▶ ***
    what looks like one wherever it stands                                 https://user:password@host, …        ┘

Nothing of it helps against code of the user's that means to give a secret away.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache

MASK = "***"
MIN_SECRET = 8  # characters; a shorter value is a word that texts are full of

# Words of a name that holds a credential: `secret`, `aws_access_key_id`, `api-key`, `sas_token`, `connection_string` ...
_CREDENTIAL = re.compile(
    r"(^|[^a-z])(key|secret|token|password|passwd|passphrase|credentials?|connection_string|auth_string)([^a-z]|$)",
    re.IGNORECASE,
)
_CAMEL_CASE = re.compile(r"(?<=[a-z])(?=[A-Z])")  # where SSECustomerKey has words
_NO_CREDENTIAL = re.compile(r"kms_key|bucket_key|key_md5", re.IGNORECASE)  # which of a store's keys to encrypt with
# Which one it is, where it lies, or how many there are.
_NO_SECRET = re.compile(r"(_id|path|file|dir|url|uri|mode|limit|budget)$", re.IGNORECASE)

_SHAPES = (
    (re.compile(r"(?<=://)[^\s/@:]*:[^\s/@]+(?=@)"), MASK),
    (re.compile(r"(authorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic)\s+)[^\s'\",]+", re.IGNORECASE), rf"\1{MASK}"),
    (
        re.compile(r"([?&][\w.-]*(?:key|token|secret|password|signature|credential)=)[^&\s'\"]+", re.IGNORECASE),
        rf"\1{MASK}",
    ),
)

_remembered: set[str] = set()


def names_credential(name: str) -> bool:
    """Whether what has this name, a key or an environment variable, is a credential."""
    words = _CAMEL_CASE.sub("_", name)
    return _CREDENTIAL.search(words) is not None and _NO_CREDENTIAL.search(words) is None


def remember(secret: str) -> None:
    """Mask this value too, in this process."""
    _remembered.add(secret)


def redact(text: str) -> str:
    """The text without the secrets that this process knows, and without what looks like one."""
    text = _known().sub(MASK, text)
    for shape, masked in _SHAPES:
        text = shape.sub(masked, text)
    return text


def holds_secret(text: str) -> bool:
    """Whether a secret that this process knows stands in the text."""
    return _known().search(text) is not None


def _known() -> re.Pattern[str]:
    values = {value for name, value in os.environ.items() if _is_secret(name)} | _remembered
    return _pattern(frozenset(value for value in values if len(value) >= MIN_SECRET))


@lru_cache(maxsize=1024)
def _is_secret(name: str) -> bool:
    return names_credential(name) and _NO_SECRET.search(name) is None


@lru_cache(maxsize=16)
def _pattern(values: frozenset[str]) -> re.Pattern[str]:
    """The longest first: one may begin as another does. Of no values: one that never matches."""
    if not values:
        return re.compile(r"(?!)")
    return re.compile("|".join(re.escape(value) for value in sorted(values, key=len, reverse=True)))
