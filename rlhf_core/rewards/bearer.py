"""The secret that a client shows to a reward server. It lives in the environment: configurations are stored and shown."""

from __future__ import annotations

import os

from rlhf_core.errors import ConfigError


def bearer_token(name: str, setting: str) -> str:
    """The value of an environment variable.

    Raises:
        ConfigError: there is none, or it cannot stand in an HTTP header. The message names the ``setting``, never the value.
    """
    token = os.environ.get(name, "").strip()
    if not token:
        raise ConfigError(
            f"{setting}: there is no such environment variable in this process, or it is empty: export it before the run "
            "(and before `rlhf up`) is started"
        )
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(
            f"{setting}: what the environment variable holds is no printable ASCII text: make another token"
        )
    return token
