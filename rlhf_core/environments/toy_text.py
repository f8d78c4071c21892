"""Gymnasium's small worlds, told in words: FrozenLake, CliffWalking, Taxi, Blackjack.

::

    env:gymnasium/FrozenLake-v1?is_slippery=false&random_map=4&max_episode_steps=20

**Actions.** The last word of the answer that names an action counts, whatever stands around it and in whatever case:
``I go left, then down`` is down. A number of the list counts too, in brackets: ``[1]``. Everything else is no action: the
policy is told what the actions are, and nothing moves.

=====================  ============================================================================================
``random_map``         FrozenLake: the width of a map that each episode draws for itself; default: the fixed map
``render=rgb_array``   a picture of the world comes with each observation after the first, for models that see
``max_episode_steps``  steps after which the episode ends without success
others                 of the world, such as ``is_slippery``
=====================  ============================================================================================
"""

from __future__ import annotations

import io
import os
import re
from typing import TYPE_CHECKING, Any

from rlhf_core.environments.base import Reaction, Scene, TextEnvironment, needed
from rlhf_core.environments.registry import unknown
from rlhf_core.environments.worlds import WORLDS, World
from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from rlhf_core.environments.spec import EpisodeSpec

EXTRA = "pip install 'rlhf-flow[envs]'"


class ToyText(TextEnvironment):
    """One world."""

    def __init__(self, episode: EpisodeSpec, world: World) -> None:
        self._settings = episode.settings
        self._name = episode.name
        self._world = world
        options = dict(episode.settings.options)
        self._pictures = _render(episode.name, options.pop("render", None))
        self._random_map = options.pop("random_map", None)
        if self._random_map is not None:
            options["desc"] = _random_map(episode, world, self._random_map)
        self._env = self._made(options)
        self._steps = 0

    def reset(self, seed: int) -> Scene:
        """See the base class."""
        seen, _ = self._env.reset(seed=seed)
        state = self._world.tell(self._env.unwrapped, seen)
        return Scene(f"{self._world.rules(self._env.unwrapped)}\n{state}\n{self._actions}")

    def step(self, action: str) -> Reaction:
        """See the base class."""
        number = action_in(action, self._world.actions)
        if number is None:
            said = f"That names no action. {self._actions}"
            return Reaction(Scene(said, self._picture()), self._settings.invalid_reward, False, {"invalid": 1.0})
        seen, reward, terminated, truncated, _ = self._env.step(number)
        self.solved = bool(terminated) and self._world.is_solved(float(reward))
        text = self._world.tell(self._env.unwrapped, seen)
        if terminated or truncated:
            ended = "You did it." if self.solved else "It is over." if terminated else "There is no time left."
            text = f"{text}\n{ended}"
        return Reaction(Scene(text, self._picture()), float(reward), bool(terminated or truncated), {"invalid": 0.0})

    def close(self) -> None:
        """See the base class."""
        self._env.close()

    @property
    def _actions(self) -> str:
        return f"Answer with one of: {', '.join(self._world.actions)}."

    def _made(self, options: dict[str, Any]) -> Any:
        gymnasium = needed("gymnasium", EXTRA)
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pictures are drawn by pygame, which looks for a screen
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
        try:
            return gymnasium.make(self._name, render_mode="rgb_array" if self._pictures else None, **options)
        except (TypeError, ValueError, KeyError, AssertionError) as error:
            raise ConfigError(f"gymnasium/{self._name} refuses its options {options}: {error}") from error

    def _picture(self) -> bytes | None:
        if not self._pictures:
            return None
        image = needed("PIL.Image", EXTRA)
        written = io.BytesIO()
        image.fromarray(self._env.render()).save(written, format="PNG")
        return written.getvalue()


def make(episode: EpisodeSpec) -> ToyText:
    """See ``registry.make_environment``."""
    if episode.name not in WORLDS:
        raise unknown("world of gymnasium that is told in words", episode.name, list(WORLDS))
    return ToyText(episode, WORLDS[episode.name])


def prepare() -> None:
    """See ``registry.prepare``."""
    needed("gymnasium", EXTRA)
    needed("gymnasium.envs.toy_text", EXTRA)


def action_in(text: str, actions: tuple[str, ...]) -> int | None:
    """The number of the action that is named last; None if none is."""
    listed = "|".join(re.escape(action) for action in sorted(actions, key=len, reverse=True))
    pattern = re.compile(rf"(?<!\w)(?P<word>{listed})(?!\w)|\[\s*(?P<number>\d{{1,3}})\s*\]", re.IGNORECASE)
    found = None
    for match in pattern.finditer(text):
        number = int(match["number"]) if match["number"] else actions.index(match["word"].lower())
        found = number if number < len(actions) else found
    return found


def _render(name: str, mode: Any) -> bool:
    if mode not in (None, "rgb_array"):
        raise ConfigError(f"gymnasium/{name}: render={mode!r}: use rgb_array for pictures, or leave it out")
    return mode is not None


def _random_map(episode: EpisodeSpec, world: World, width: Any) -> list[str]:
    if not world.has_maps:
        raise ConfigError(f"gymnasium/{episode.name}: random_map is of FrozenLake: remove it")
    if isinstance(width, bool) or not isinstance(width, int) or not 2 <= width <= 16:
        raise ConfigError(f"gymnasium/{episode.name}: random_map={width!r}: a width from 2 to 16 is wanted")
    lake = needed("gymnasium.envs.toy_text.frozen_lake", EXTRA)
    return list(lake.generate_random_map(size=width, seed=episode.seed))
