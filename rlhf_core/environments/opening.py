"""An environment at its beginning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.environments.registry import make_environment

if TYPE_CHECKING:
    from rlhf_core.environments.base import Scene, TextEnvironment
    from rlhf_core.environments.spec import EpisodeSpec


def opened(episode: EpisodeSpec) -> tuple[TextEnvironment, Scene]:
    """The environment of an episode, and what it shows first, the instruction included.

    Raises:
        ConfigError: there is no such environment, its package is not installed, or it cannot be played so.
    """
    environment = make_environment(episode)
    scene = environment.reset(episode.seed)
    if episode.settings.instruction:
        scene = scene._replace(text=f"{scene.text}\n{episode.settings.instruction}")
    return environment, scene
