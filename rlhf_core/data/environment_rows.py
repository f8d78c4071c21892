"""Rows of a dataset of environments: what each shows first is the prompt, and its label says how to make it again.

::

    env:textarena/GuessTheNumber-v0?size=2 ──▶ {"input": "You are Player 0 ...", "label": {"environment": ..., "seed": ...}}
                                               {"input": ...,                    "label": {...}}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.data.values import Row
from rlhf_core.environments.opening import opened
from rlhf_core.environments.spec import parse_environment
from rlhf_core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlhf_core.environments.spec import EpisodeSpec

INPUT, LABEL = "input", "label"  # the default names of data.input_key and data.label_key


def read_environments(spec: str) -> Iterator[Row]:
    """The rows of ``env:...``. The first environment is made twice, since one that begins otherwise each time is of no use.

    Raises:
        DataError: there is no such environment, it cannot be made, or its seed does not determine how it begins.
    """
    parsed = parse_environment(spec)
    for number, episode in enumerate(parsed.episodes()):
        first = _first_observation(spec, episode)
        if number == 0 and first != _first_observation(spec, episode):
            raise DataError(
                f"{spec}: it begins otherwise each time, with the same seed: the samples of a prompt need one task"
            )
        values = {INPUT: first, LABEL: episode.to_label(first), "datasource": parsed.datasource}
        yield Row(number, f"{spec}, episode {number}", values)


def _first_observation(spec: str, episode: EpisodeSpec) -> str:
    try:
        environment, scene = opened(episode)
    except ConfigError as error:
        raise DataError(f"{spec}: {error}") from error
    environment.close()
    return scene.text
