"""Secrets of a run: from Prefect's blocks into the environment of its processes, and nowhere else.

::

    run.secrets: {REWARD_TOKEN: my-block} ─▶ block of type Secret ─▶ $REWARD_TOKEN here and in every worker
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from prefect.blocks.system import Secret

from rlhf_core.cluster.context import use_secrets
from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


async def load_secrets(blocks: Mapping[str, str]) -> None:
    """Have the values in this process's environment.

    Args:
        blocks: ``run.secrets``: environment variable -> name of a block.

    Raises:
        ConfigError: there is no such block, or it holds no text.
    """
    use_secrets({variable: await _value(variable, block) for variable, block in blocks.items()})


def loaded_secrets(blocks: Mapping[str, str]) -> dict[str, str]:
    """The same variables with their values, once they are loaded: for the workers."""
    return {variable: os.environ[variable] for variable in blocks}


async def _value(variable: str, block: str) -> str:
    place = f"run.secrets.{variable}={block!r}"
    try:
        loaded: Secret[str] = await Secret.aload(block)
    except ValueError as error:  # Prefect's, of a name that is not there
        raise ConfigError(
            f"{place}: the Prefect server has no Secret block of this name: make it on the page Blocks of its UI, or with "
            "`prefect block create secret`"
        ) from error
    value = loaded.value.get_secret_value()
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{place}: the block holds no text: store the value of the variable in it, as it is")
    return value
