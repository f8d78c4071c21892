"""reasoning-gym: a question, an answer, and a score in 0..1 by the task's own rule.

::

    env:reasoning_gym/chain_sum?size=512&min_terms=2&max_terms=3&attempts=2&answer=last_number

===========  ======================================================================================================
``attempts`` answers that may be given to a question; after a wrong one the policy is told so. Default 1
``answer``   what counts as the answer: ``text``, what stands in ``<answer>…</answer>``, else all of it (default);
             ``last_number``, the last number
others       of the task's configuration, such as ``min_terms``
===========  ======================================================================================================

The reward is the score of the last answer; those before it, which were wrong, earn nothing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rlhf_core.environments.base import Reaction, Scene, TextEnvironment, needed
from rlhf_core.environments.registry import unknown
from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from rlhf_core.environments.spec import EpisodeSpec

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")


class Question(TextEnvironment):
    """One question."""

    def __init__(self, dataset: Any, entry: dict[str, Any], attempts: int, take: str, episode: EpisodeSpec) -> None:
        self._dataset = dataset
        self._entry = entry
        self._left = attempts
        self._take = take
        self._settings = episode.settings

    def reset(self, seed: int) -> Scene:
        """See the base class; the question is fixed by its place in the dataset."""
        return Scene(self._entry["question"])

    def step(self, action: str) -> Reaction:
        """See the base class."""
        self._left -= 1
        answer = answer_in(action, self._take)
        score = 0.0 if answer is None else self._score(answer)
        self.solved = score >= 1.0
        done = self.solved or self._left < 1
        if self.solved:
            text = "That is right."
        elif answer is None:
            text = "No answer was found in that."
        else:
            text = "That is not right."
        if not done:
            text += f" Try again: {self._left} {'attempt is' if self._left == 1 else 'attempts are'} left."
        invalid = answer is None
        reward = (score if done else 0.0) + (self._settings.invalid_reward if invalid else 0.0)
        return Reaction(Scene(text), reward, done, {"invalid": float(invalid)})

    def _score(self, answer: str) -> float:
        """Some scorers raise on an answer of another kind than they expect (a word where a number is wanted): it is wrong."""
        try:
            return float(self._dataset.score_answer(answer=answer, entry=self._entry))
        except Exception:  # noqa: BLE001  any exception of a scorer on text of the policy's
            return 0.0


def make(episode: EpisodeSpec) -> Question:
    """See ``registry.make_environment``."""
    options = dict(episode.settings.options)
    attempts, take = options.pop("attempts", 1), options.pop("answer", "text")
    if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1:
        raise ConfigError(f"reasoning_gym/{episode.name}: attempts={attempts!r}: a whole number from 1 is wanted")
    if take not in ("text", "last_number"):
        raise ConfigError(f"reasoning_gym/{episode.name}: answer={take!r}: use text or last_number")
    dataset = _dataset(episode, options)
    return Question(dataset, dataset[0], attempts, take, episode)


def prepare() -> None:
    """See ``registry.prepare``."""
    needed("reasoning_gym", "pip install reasoning-gym")


def answer_in(action: str, take: str) -> str | None:
    """The answer in what the policy said; None without one."""
    if take == "last_number":
        numbers = NUMBER.findall(action)
        return numbers[-1].replace(",", "") if numbers else None
    tagged = TAGGED.findall(action)
    return (tagged[-1] if tagged else action).strip() or None


def _dataset(episode: EpisodeSpec, options: dict[str, Any]) -> Any:
    """A dataset of one entry, by the episode's own seed: an item costs the same wherever it stands."""
    package = needed("reasoning_gym", "pip install reasoning-gym")
    known = needed("reasoning_gym.factory", "pip install reasoning-gym").DATASETS
    if episode.name not in known:
        raise unknown("task of reasoning_gym", episode.name, list(known))
    try:
        return package.create_dataset(episode.name, size=1, seed=episode.seed, **options)
    except (TypeError, ValueError, AssertionError) as error:
        of_task = [name for name in known[episode.name][1].__dataclass_fields__ if name not in ("seed", "size")]
        raise ConfigError(
            f"reasoning_gym/{episode.name} refuses its options {options}: {error}; it takes {', '.join(of_task)}"
        ) from error
