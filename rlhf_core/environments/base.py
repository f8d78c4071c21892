"""What a world of text is: it shows something, hears what the policy says, and says what became of it.

::

    reset(seed) ─▶ Scene ─▶ the policy speaks ─▶ step(action) ─▶ Reaction ─▶ … ─▶ Reaction(done=True)

Single use: made, reset once, played, closed. What cannot be read as an action is answered in words, and may cost something
(``Settings.invalid_reward``); it is never an error. An error is a fault of the environment, and fails the sample.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rlhf_core.errors import ConfigError


class Scene(NamedTuple):
    """What the policy is shown."""

    text: str
    image: bytes | None = None  # PNG


class Reaction(NamedTuple):
    """What became of an action."""

    scene: Scene
    reward: float
    done: bool
    info: dict[str, float]  # numbers by name; ``invalid``: 1 if the action could not be read


@dataclass(frozen=True, slots=True)
class Settings:
    """What every environment understands."""

    invalid_reward: float = 0.0  # added where an action cannot be read, or is against the rules
    instruction: str = ""  # appended to the first observation
    options: dict[str, Any] = field(default_factory=dict)  # of the collection


class TextEnvironment(ABC):
    """One world, for one episode."""

    solved: bool = False  # True once the task is done as it should be

    @abstractmethod
    def reset(self, seed: int) -> Scene:
        """Begin; the same seed begins the same episode.

        Raises:
            ConfigError: an option that the environment cannot honour.
        """

    @abstractmethod
    def step(self, action: str) -> Reaction:
        """Hear what the policy said."""

    def close(self) -> None:  # noqa: B027  most have nothing to close
        """Let go of what it holds."""


class OwnRandomness:
    """``random`` and ``numpy.random`` as an environment's own, while the block lasts.

    Some collections draw from the generators of the whole process. So an episode depends on its seed alone, and whoever else
    draws in the process does not notice it.
    """

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy: Any = np.random.RandomState(seed % 2**32).get_state()

    def __enter__(self) -> None:
        self._others: Any = random.getstate(), np.random.get_state()
        random.setstate(self._python)
        np.random.set_state(self._numpy)

    def __exit__(self, *_: object) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()
        random.setstate(self._others[0])
        np.random.set_state(self._others[1])


def needed(name: str, extra: str) -> Any:  # a module, whose types are the package's affair
    """A package that not every installation has.

    Raises:
        ConfigError: it is not installed, or cannot be imported.
    """
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{name} cannot be imported ({error}): {extra}") from error
