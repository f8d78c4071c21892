"""textarena: games for one player, with their own rules of how a move is written.

::

    env:textarena/GuessTheNumber-v0?size=256&max_number=8

Options go to the game. What the policy is shown after a move is what is new: the game's messages and the board, not the
history, which stands before it anyway. The reward comes at the end, as the game gives it: 1 for a game that is won. A move
against the rules is told to the policy; most games end at the second in a row.

Games that are played against others or with a language model are refused, and so are those whose word lists are not there:
nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import io
import re
from typing import TYPE_CHECKING, Any

from rlhf_core.environments.base import OwnRandomness, Reaction, Scene, TextEnvironment, needed
from rlhf_core.environments.registry import unknown
from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlhf_core.environments.spec import EpisodeSpec

EXTRA = "pip install 'rlhf-flow[envs]'"
RAW = "-raw"  # the version of a game without the wrappers, which repeat the history every turn
WORD_LISTS = ("corpora", "taggers", "tokenizers")  # folders of nltk's data


class Game(TextEnvironment):
    """One game."""

    def __init__(self, episode: EpisodeSpec) -> None:
        self._name = episode.name
        self._settings = episode.settings
        self._random = OwnRandomness(episode.seed)
        with self._quietly():
            self._game = _made(episode)

    def reset(self, seed: int) -> Scene:
        """See the base class."""
        with self._quietly():
            try:
                self._game.reset(num_players=1, seed=seed)
            except (AssertionError, ValueError) as error:
                raise _refusal(self._name, error) from error
            arena = needed("textarena", EXTRA)
            if not isinstance(self._game.state, arena.SinglePlayerState):
                raise _refusal(self._name, "it is a game for several players")
            return Scene(self._news()[0])

    def step(self, action: str) -> Reaction:
        """See the base class."""
        with self._quietly():
            done, _ = self._game.step(action)
            text, invalid = self._news()
            reward = 0.0
            if done:
                rewards, infos = self._game.close()
                reward = float((rewards or {}).get(0, 0.0))
                info = infos.get(0, {})
                invalid = invalid or bool(info.get("invalid_move"))
                text = "\n".join(part for part in (text, str(info.get("reason") or "")) if part)
                self.solved = reward >= 1.0
        reward += self._settings.invalid_reward if invalid else 0.0
        return Reaction(Scene(text), reward, bool(done), {"invalid": float(invalid)})

    def _news(self) -> tuple[str, bool]:
        """What the game has said since it was asked last, and whether it complained of the move."""
        arena = needed("textarena", EXTRA)
        _, messages = self._game.get_observation()
        if isinstance(messages, str):
            return messages, False
        own = [(text, kind) for sender, text, kind in messages if sender == arena.GAME_ID]
        complained = any(
            kind is arena.ObservationType.GAME_ADMIN and "invalid move" in text.lower() for text, kind in own
        )
        return "\n".join(text for text, _ in own), complained

    @contextlib.contextmanager
    def _quietly(self) -> Iterator[None]:
        """Some games print as they go, and all of them draw from the generator of the process."""
        with self._random, contextlib.redirect_stdout(io.StringIO()), _no_downloads():
            yield


def make(episode: EpisodeSpec) -> Game:
    """See ``registry.make_environment``."""
    return Game(episode)


def prepare() -> None:
    """See ``registry.prepare``."""
    needed("textarena", EXTRA)


def _made(episode: EpisodeSpec) -> Any:
    arena = needed("textarena", EXTRA)
    registered = needed("textarena.envs.registration", EXTRA).ENV_REGISTRY
    known = sorted(name.removesuffix(RAW) for name in registered if name.endswith(RAW))
    if episode.name not in known:
        raise unknown("game of textarena", episode.name, known)
    try:
        return arena.make(f"{episode.name}{RAW}", **episode.settings.options)
    except TypeError as error:
        raise ConfigError(
            f"textarena/{episode.name} refuses its options {episode.settings.options}: {error}"
        ) from error
    except (ImportError, OSError, SyntaxError, ValueError, LookupError) as error:
        raise _refusal(episode.name, error) from error


def _refusal(name: str, reason: Any) -> ConfigError:
    said = re.sub(r"\s+", " ", str(reason)).strip()[:200]
    return ConfigError(
        f"textarena/{name} cannot be played here: {said or type(reason).__name__}; choose another game for one player"
    )


@contextlib.contextmanager
def _no_downloads() -> Iterator[None]:
    """Some games fetch word lists when they are imported: only those that are there may be used."""
    nltk = needed("nltk", EXTRA)
    fetch = nltk.download

    def find(names: Any, *_: Any, **__: Any) -> bool:
        for name in [names] if isinstance(names, str) else list(names or ()):
            _check_is_there(nltk, name)
        return True

    nltk.download = find
    try:
        yield
    finally:
        nltk.download = fetch


def _check_is_there(nltk: Any, name: str) -> None:
    for folder in WORD_LISTS:
        for suffix in ("", ".zip"):
            with contextlib.suppress(LookupError):
                nltk.data.find(f"{folder}/{name}{suffix}")
                return
    raise ConfigError(
        f"it needs the word list {name!r}, and nothing is downloaded in a run: python -m nltk.downloader {name}"
    )
